"""How often the memory of tensors is referred to. Imports no DeepSpeed.

Tensors, views and what autograd keeps are counted in C++, a storage that a program holds in Python.
What no count shows: an array on the memory, and a copy that a stream has yet to make.
"""

from __future__ import annotations

import sys

import torch

from stepwell._tensors import _count_of_memory

__all__ = ["has_other_holders", "references"]


def references(tensor: torch.Tensor) -> tuple[int, int]:
    """How often the memory of `tensor` is referred to in C++, and in Python.

    Only comparisons with an earlier result mean something: the numbers depend on the versions of
    torch and Python.
    """
    return _count_of_memory(tensor), sys.getrefcount(tensor.untyped_storage())


_ALONE, _ALONE_IN_PYTHON = references(torch.empty(1, device="cpu"))


def has_other_holders(tensor: torch.Tensor) -> bool:
    """Whether anything but `tensor` refers to its memory, as far as counts tell."""
    count, count_in_python = references(tensor)
    return count > _ALONE or count_in_python > _ALONE_IN_PYTHON
