"""The pages: what they point to exists, and their programs parse.

They can be read in a terminal, and the README fits a screen and a half.
"""

import ast
import re
import textwrap
from pathlib import Path

import pytest
from stepwell.cli import app
from typer.main import get_command

ROOT = Path(__file__).resolve().parents[1]
PAGES = sorted(
    [*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), ROOT / "benches" / "README.md"],
    key=lambda page: page.name,
)
WIDTH_MAX = 100
README_LINES_MAX = 96  # a screen and a half
# Where a path in backticks may begin.
FOLDERS = ("", "rust", "python/stepwell")

pytestmark = pytest.mark.skipif(
    not (ROOT / "ARCHITECTURE.md").is_file(), reason="the pages are not beside the tests"
)


def blocks(page, language):
    """The code blocks of a page in one language."""
    found = re.findall(r"^```(\w*)\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL)
    return [textwrap.dedent(text) for name, text in found if name == language]


def leads_somewhere(page, link):
    path, _, heading = link.partition("#")
    target = page.parent / path if path else page
    if not heading:
        return target.exists()
    headings = re.findall(r"^#+ (.*)", target.read_text(), re.MULTILINE)
    return heading in {re.sub(r"[^\w -]", "", each).lower().replace(" ", "-") for each in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_what_a_page_points_to_is_there(page):
    text = page.read_text()
    local = [link for link in re.findall(r"\]\(([^)\s]+)\)", text) if "://" not in link]
    assert [link for link in local if not leads_somewhere(page, link)] == []
    paths = re.findall(r"`((?:[a-z_0-9]+/)+(?:[a-z_0-9]+\.[a-z]+)?)`", text)
    known = ("rust", "python", "tests", "docs", "benches", "examples")
    known += ("offload", "weights", "deepspeed", "adam", "state")
    for path in paths:
        if path.startswith(known):
            assert any((ROOT / folder / path).exists() for folder in FOLDERS), path


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_prose_fits_a_terminal(page):
    # A row of a table cannot be broken.
    lines = [line for line in page.read_text().splitlines() if not line.startswith("|")]
    assert [line for line in lines if len(line) > WIDTH_MAX] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_programs_parse(page):
    for program in blocks(page, "python"):
        ast.parse(program)


def test_the_readme_fits_its_screens_and_opens_with_its_picture():
    lines = (ROOT / "README.md").read_text().splitlines()
    assert len(lines) <= README_LINES_MAX
    assert any(line.startswith("![") for line in lines[:10])


def test_commands_that_pages_name_exist():
    command = get_command(app)
    known = {name: getattr(sub, "commands", {}) for name, sub in command.commands.items()}
    for page in PAGES:
        for first, second in re.findall(
            r"(?:^|`)stepwell ([a-z]+)(?: ([a-z]+))?", page.read_text(), re.MULTILINE
        ):
            assert first in known, (page.name, first)
            assert not known[first] or second in known[first], (page.name, first, second)
