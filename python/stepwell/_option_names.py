"""Names of options: what is said of one that is unknown, or that belongs elsewhere.

Python refuses an unknown keyword by its name alone. A parameter group takes any key, so that a
misspelt one would train with a default in silence.
"""

from __future__ import annotations

import difflib
import functools
import inspect
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable

__all__ = ["check_group_keys", "check_known", "named_options"]

T = TypeVar("T")

# What options are called elsewhere.
_MEANT = {
    "adam_beta1": "betas",
    "beta": "betas",
    "beta1": "betas",
    "adam_epsilon": "eps",
    "epsilon": "eps",
    "learning_rate": "lr",
    "decay": "weight_decay",
    "wd": "weight_decay",
    "clip_grad_norm": "clip_norm",
    "grad_clip": "clip_norm",
    "gradient_clip_val": "clip_norm",
    "gradient_clipping": "clip_norm",
    "max_grad_norm": "clip_norm",
    "max_norm": "clip_norm",
    "grad_accumulation_steps": "accumulation_steps",
    "gradient_accumulation_steps": "accumulation_steps",
    "num_threads": "threads",
    "optim_bits": "moments",
    "state_dtype": "moments",
    "drives": "paths",
    "folders": "paths",
    "nvme_path": "tier",
    "volume": "tier",
}

# What to do where nothing here has such an option.
_INSTEAD = {
    "amsgrad": "torch.optim.AdamW(amsgrad=True)",
    "capturable": "leave it out: a step in host memory is in no CUDA graph",
    "differentiable": "torch.optim.AdamW(differentiable=True)",
}

# How alike a name has to be. Keys of a group may be the program's own, as `no_weight_decay` is.
_LIKE, _LIKE_IN_GROUPS = 0.75, 0.9


class _Options(NamedTuple):
    where: str
    """What messages call the class."""
    names: tuple[str, ...]


_OPTIONS: dict[type, _Options] = {}


def named_options(where: str) -> Callable[[type[T]], type[T]]:
    """A decorator of classes: an unknown option of the constructor is refused with what is meant.

    It is a TypeError, as Python has it. Type checkers see the constructor as it is written.

    Args:
        where: what messages call the class.
    """

    def decorate(cls: type[T]) -> type[T]:
        made: Any = cls.__init__
        parameters = inspect.signature(made).parameters
        _OPTIONS[cls] = _Options(where, tuple(parameters)[1:])

        @functools.wraps(made)
        def init(self: Any, *args: Any, **options: Any) -> None:
            if not options.keys() <= parameters.keys():
                try:
                    check_known(options, cls)
                except ValueError as error:
                    raise TypeError(str(error)) from None
            made(self, *args, **options)

        cls.__init__ = init  # type: ignore[method-assign]
        return cls

    return decorate


def check_known(
    options: Iterable[str], cls: type, *, where: str | None = None, but: Collection[str] = ()
) -> None:
    """Raises ValueError for the first option that a class has not.

    Args:
        options: their names.
        cls: a class with `named_options`.
        where: what is said in place of the class's own name.
        but: options of the class that are not to be given here.
    """
    known = [name for name in _OPTIONS[cls].names if name not in but]
    for name in options:
        if name not in known:
            hint = _near(name, known, _LIKE) or _owners(name)
            raise ValueError(
                f"`{name}` is no option of {where or _OPTIONS[cls].where}, expected one of "
                f"{', '.join(known)}" + (f". hint: {hint}" if hint else "")
            )


def check_group_keys(keys: Iterable[str], known: Collection[str], optimizer: object) -> None:
    """Raises ValueError for a key of a parameter group that is an option, or meant to be one.

    Other keys are the program's own, as for torch.

    Args:
        keys: those of the group.
        known: those that have an effect in one.
        optimizer: whose group it is.
    """
    where, options = next(_OPTIONS[cls] for cls in type(optimizer).__mro__ if cls in _OPTIONS)
    for key in keys:
        if key in known:
            continue
        what = f"`{key}` is set for a parameter group"
        if key in options:
            raise ValueError(f"{what}, expected for the optimizer as a whole")
        hint = _near(key, [*known, *options], _LIKE_IN_GROUPS)
        # Other options may be keys of the program's own: `name`, `device`.
        if hint or key in _MEANT or key in _MEANT.values():
            hint = hint or _owners(key)
            raise ValueError(f"{what}, where {where} does not look for it. hint: {hint}")


def _near(name: str, known: Collection[str], likeness: float) -> str:
    """Which of `known` is meant, as far as that can be said; else nothing."""
    meant = _MEANT.get(name, name)
    near = [meant] if meant in known else difflib.get_close_matches(name, known, 1, likeness)
    return f"did you mean `{near[0]}`?" if near else ""


def _owners(name: str) -> str:
    """What has an option of this name, or what to do without; else nothing."""
    meant = _MEANT.get(name, name)
    owners = [where for where, options in _OPTIONS.values() if meant in options]
    if owners and meant not in _INSTEAD:
        return f"`{meant}` is an option of {' and '.join(owners)}"
    return _INSTEAD.get(meant, "")
