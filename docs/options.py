"""Writes docs/options.md: every option that a program gives, from signatures and docstrings.

python docs/options.py
"""

from __future__ import annotations

import ast
import inspect
import itertools
import json
import re
import textwrap
from pathlib import Path
from typing import TYPE_CHECKING

import stepwell
from stepwell.deepspeed.options import Options

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

PAGE = Path(__file__).with_suffix(".md")

HEAD = """\
# Options

Each is checked when it is given; an unknown one is refused by its name. Types, what is raised, and
the rest of each text: `help(stepwell.OffloadAdamW)`. Sizes are bytes, or texts as "40GB". Commands
have theirs in `--help`. This page is written by `docs/options.py`, from signatures and docstrings.
"""

# The heading, what has the options, and how a default is written.
TABLES: list[tuple[str, type, Callable[[object], str]]] = [
    ("OffloadAdamW", stepwell.OffloadAdamW, repr),
    ("Adam; AdamW, whose weight decay is 0.01 and decoupled", stepwell.Adam, repr),
    ("Deferred: `OffloadAdamW(deferred=)`", stepwell.Deferred, repr),
    ("Volume: `OffloadAdamW(tier=)`", stepwell.Volume, repr),
    ("The block `stepwell` of a DeepSpeed JSON", Options, json.dumps),
]

# How a sentence about a value begins.
ABOUT_A_VALUE = re.compile(r'("\w+"|None): ')


def told_in_args(cls: type) -> dict[str, str]:
    """By the option, its text in the section `Args` of a docstring."""
    section = inspect.getdoc(cls).partition("\nArgs:\n")[2].partition("\n\n")[0]  # type: ignore[union-attr]
    options = re.findall(r"^    (\w+): (.*(?:\n        .*)*)", section, re.MULTILINE)
    return {name: " ".join(text.split()) for name, text in options}


def told_in_fields(cls: type) -> dict[str, str]:
    """By the field of a dataclass, the docstring that follows it."""
    body = ast.parse(textwrap.dedent(inspect.getsource(cls))).body[0].body  # type: ignore[attr-defined]
    return {
        field.target.id: " ".join(str(text.value.value).split())
        for field, text in itertools.pairwise(body)
        if isinstance(field, ast.AnnAssign)
        and isinstance(field.target, ast.Name)
        and isinstance(text, ast.Expr)
        and isinstance(text.value, ast.Constant)
    }


def essence(text: str) -> str:
    """The first sentence of a text, and those about values."""
    first, *others = re.split(r'(?<=\.) (?=["A-Z0-9`])', text)
    return " ".join([first, *filter(ABOUT_A_VALUE.match, others)]).replace("|", r"\|")


def rows(cls: type, written: Callable[[object], str]) -> Iterator[str]:
    """A row of the table for each option."""
    told = told_in_args(cls) or told_in_fields(cls)
    for name, parameter in inspect.signature(cls).parameters.items():
        default = parameter.default
        shown = "" if default is parameter.empty else f"`{written(default)}`"
        what = essence(told[name]).replace("None:", f"{written(None)}:")
        yield f"| `{name}` | {shown} | {what} |"


def page() -> str:
    """The whole page."""
    parts = [HEAD]
    for heading, cls, written in TABLES:
        parts += [f"\n## {heading}\n\n| option | default | what |\n|---|---|---|\n"]
        parts += [f"{row}\n" for row in rows(cls, written)]
    return "".join(parts)


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
