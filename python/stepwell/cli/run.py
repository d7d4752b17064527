"""`stepwell run`: a Python program with Stepwell registered in DeepSpeed.

Also in the processes that the program spawns.
"""

from __future__ import annotations

import builtins
import importlib.util
import io
import multiprocessing.spawn
import runpy
import sys
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["Launch", "run"]


@dataclass
class Launch:
    """What is to be run once the command line is parsed."""

    target: str | None = None
    """A script's path, or a module's name."""
    is_module: bool = False
    """Which of the two it is."""
    arguments: list[str] = field(default_factory=list)
    """What the program finds in `sys.argv[1:]`."""
    local_rank: int | None = None
    """The option that the `deepspeed` launcher puts in front of a program's arguments."""

    def __call__(self) -> None:
        """Registers Stepwell, then runs the program as `python` would.

        The program's exceptions and exits reach the caller.
        """
        assert self.target is not None
        _register()
        if self.local_rank is not None:
            self.arguments.insert(0, f"--local_rank={self.local_rank}")
        sys.argv = [self.target, *self.arguments]
        if self.is_module:
            _set_path_entry(str(Path.cwd()))
            runpy.run_module(self.target, run_name="__main__", alter_sys=True)
        else:
            _set_path_entry(str(Path(self.target).resolve().parent))
            _run_script(self.target)


def run(
    context: typer.Context,
    target: Annotated[
        str,
        typer.Argument(
            metavar="SCRIPT", help="A Python file; with -m, a module.", show_default=False
        ),
    ],
    arguments: Annotated[
        list[str] | None, typer.Argument(metavar="ARGS", help="Its arguments.")
    ] = None,
    module: Annotated[
        bool, typer.Option("-m", help="SCRIPT is the name of a module, as for `python -m`.")
    ] = False,
) -> None:
    """Run a Python program whose DeepSpeed steps on Stepwell. The program itself stays as it is.

    Everything else is as with `python SCRIPT [ARGS]...`. Under a launcher, one of:

    - `deepspeed --module stepwell run train.py [ARGS]...`
    - `torchrun -m stepwell run train.py [ARGS]...`
    - `accelerate launch -m stepwell run train.py [ARGS]...`
    """
    if not module and not Path(target).is_file():
        raise typer.BadParameter(
            f"`{target}` is not a file. hint: a module is run by `stepwell run -m {target}`"
        )
    if importlib.util.find_spec("deepspeed") is None:
        typer.echo(
            "error: deepspeed is not installed. hint: pip install 'stepwell[deepspeed]'", err=True
        )
        raise typer.Exit(1)
    launch: Launch = context.obj
    launch.target, launch.is_module, launch.arguments = target, module, list(arguments or ())


def _set_path_entry(entry: str) -> None:
    """Puts the program's folder where `python` puts it.

    That is the place of the console script's folder, or of the working directory.
    """
    if not getattr(sys.flags, "safe_path", False):
        sys.path[0] = entry


def _run_script(path: str) -> None:
    # Not runpy.run_path: that takes its `__main__` away again when the file ends, while threads and
    # exit handlers still run.
    module = ModuleType("__main__")
    module.__file__ = str(Path(path).absolute())
    module.__dict__["__builtins__"] = builtins
    sys.modules["__main__"] = module
    with io.open_code(module.__file__) as file:
        code = compile(file.read(), path, "exec", dont_inherit=True)
    exec(code, module.__dict__)  # noqa: S102


def _register() -> None:
    """Registers in this process, and in those that it starts by spawn or forkserver.

    They register before they import the program.
    """
    from stepwell import deepspeed

    deepspeed.register()
    prepare: Callable[[str], dict[str, Any]] = multiprocessing.spawn.get_preparation_data

    def get_preparation_data(name: str) -> dict[str, Any]:
        # The child unpickles this before all else, and ignores a key that it does not know.
        return {**prepare(name), "stepwell": _RegisterOnArrival()}

    multiprocessing.spawn.get_preparation_data = get_preparation_data


class _RegisterOnArrival:
    """Registers in the process that unpickles it."""

    def __reduce__(self) -> tuple[Callable[[], None], tuple[()]]:
        return _register, ()
