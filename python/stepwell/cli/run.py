"""`stepwell run`: a Python program with Stepwell registered in DeepSpeed.

Also in the processes that the program spawns.
"""

from __future__ import annotations

import builtins
import importlib.util
import io
import multiprocessing.spawn
import os
import runpy
import socket
import sys
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["Launch", "run"]

_COMM = "deepspeed.comm.comm"

# What a launcher of MPI says, one of these: how many ranks there are.
_SIZES_OF_MPI = ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "MV2_COMM_WORLD_SIZE", "PMIX_RANK")

# Whose optimizers this process does not see.
_has_children = False


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
        try:
            if self.is_module:
                _set_path_entry(str(Path.cwd()))
                runpy.run_module(self.target, run_name="__main__", alter_sys=True)
            else:
                _set_path_entry(str(Path(self.target).resolve().parent))
                _run_script(self.target)
        except SystemExit as end:
            if not end.code:
                _tell_of_none()
            raise
        _tell_of_none()


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

    Everything else is as with `python SCRIPT [ARGS]...`. Without a launcher it is one process of
    one GPU. Under a launcher, one of:

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
    from stepwell.deepspeed.after_import import after_import

    deepspeed.register()
    after_import(_COMM, _stand_alone)
    prepare: Callable[[str], dict[str, Any]] = multiprocessing.spawn.get_preparation_data

    def get_preparation_data(name: str) -> dict[str, Any]:
        global _has_children
        _has_children = True
        # The child unpickles this before all else, and ignores a key that it does not know.
        return {**prepare(name), "stepwell": _RegisterOnArrival()}

    multiprocessing.spawn.get_preparation_data = get_preparation_data


def _stand_alone() -> None:
    """Has a process that no launcher has started be the only rank, once DeepSpeed is imported.

    DeepSpeed would ask MPI, which most machines do not have.
    """
    module = sys.modules[_COMM]
    ask: Callable[..., None] = module.mpi_discovery

    def mpi_discovery(*args: Any, **kwargs: Any) -> None:
        is_of_slurm = os.environ.get("SLURM_STEP_NUM_TASKS", "1") != "1"
        if is_of_slurm or any(name in os.environ for name in _SIZES_OF_MPI):
            ask(*args, **kwargs)
            return
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        alone = {"RANK": 0, "LOCAL_RANK": 0, "WORLD_SIZE": 1}
        for name, value in {**alone, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}.items():
            os.environ.setdefault(name, str(value))

    module.mpi_discovery = mpi_discovery  # type: ignore[attr-defined]


def _tell_of_none() -> None:
    """Says that the program has ended without an optimizer of Stepwell's, if it has."""
    from stepwell._notices import has_optimizer, tell

    if not has_optimizer() and not _has_children:
        tell(
            "the program has ended, and no optimizer on Stepwell came to be in this process. "
            'hint: "offload_optimizer": {"device": "cpu"} in the DeepSpeed JSON; '
            "without DeepSpeed stepwell.OffloadAdamW"
        )


class _RegisterOnArrival:
    """Registers in the process that unpickles it."""

    def __reduce__(self) -> tuple[Callable[[], None], tuple[()]]:
        return _register, ()
