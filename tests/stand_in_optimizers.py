"""What stands in the place of ZeRO's optimizers, and around them: for `zero_*_stand_ins.py`.

Importing this imports DeepSpeed.
"""

import contextlib
import os
from types import SimpleNamespace

os.environ["DS_ACCELERATOR"] = "cpu"

import pytest
import torch
from stepwell.deepspeed.zero.backward import Backward


def optimizer_of(cls, fields):
    """An optimizer that has these fields and no others."""
    optimizer = object.__new__(cls)
    vars(optimizer).update(fields)
    return optimizer


def noted(calls, name, returned=None):
    """A function that notes its name and returns `returned`."""

    def note(*_, **__):
        calls.append(name)
        return returned

    return note


def parameter(ds_id, *, numel=4, world_size=1):
    """A parameter as ZeRO-3 has it, of which each rank has a piece."""
    param = torch.nn.Parameter(torch.zeros(numel))
    param.ds_id, param.ds_numel, param.ds_shape = ds_id, numel, (numel,)
    piece = -(-numel // world_size)
    param.partition_numel = lambda: piece
    return param


def backward_of(calls, *, is_cleared=False):
    """A `Backward` that notes what it is told."""
    names = ("announce", "note_forward", "begin", "note_gradient", "end")
    noting = {each: noted(calls, each) for each in names}
    return SimpleNamespace(**noting, pop_cleared=lambda: is_cleared)


def checked(calls):
    """A `Backward` that notes when it is asked whether something has failed: nothing has."""
    backward = Backward()
    backward.check = noted(calls, "check")
    return backward


def partitions_of(calls, *, is_any_complete):
    """Partitions that note what a backward has them do. `is_any_complete`: of their gradients."""
    return SimpleNamespace(
        let_go=noted(calls, "let_go"),
        drop=noted(calls, "dropped"),
        gradients=SimpleNamespace(is_any_complete=is_any_complete),
    )


def assert_failed_drop_is_said(optimizer, calls):
    """The next use says why the gradients of a step that was left could not be dropped.

    `optimizer` has a `Backward`, and its step raises a MemoryError.
    """

    def fail():
        raise OSError("a copy is lost")

    optimizer._drop_gradients = fail
    with pytest.raises(MemoryError, match="no memory"):
        optimizer.step()
    assert "settled" in calls
    for use in (optimizer.step, optimizer._backward.announce, optimizer._backward.note_gradient):
        with pytest.raises(ValueError, match=r"dropped: `OSError: a copy is lost`. hint: "):
            use()
    optimizer._backward.reset()
    optimizer._backward.check()


class Gathers:
    """What several ranks gather with."""

    is_gathered = True

    def __init__(self, calls):
        self.calls = calls

    @contextlib.contextmanager
    def decided(self):
        self.calls.append("decided")
        yield
        self.calls.append("told")


class Timers:
    """DeepSpeed's: none may be started twice, nor stopped before."""

    def __init__(self):
        self.running, self.ended, self.logged = [], [], []

    def __call__(self, name):
        return SimpleNamespace(start=lambda: self.start(name), stop=lambda: self.stop(name))

    def start(self, name):
        assert name not in self.running
        self.running.append(name)

    def stop(self, name):
        self.running.remove(name)
        self.ended.append(name)

    def get_timers(self):
        return {
            name: SimpleNamespace(
                started_=name in self.running, stop=lambda name=name: self.stop(name)
            )
            for name in {*self.running, *self.ended}
        }

    def log(self, names):
        assert not self.running
        self.logged.append(names)


def several(monkeypatch, dist, *, world_size=2, rank=1):
    """Puts ranks in the place of `dist`'s.

    Sums within the group `ranks` are of as many like this one.
    """

    def all_reduce(tensor, op, group):
        assert op == dist.ReduceOp.SUM
        assert group == "ranks"
        tensor.mul_(world_size)

    for name, function in {
        "get_rank": lambda group=None: rank,
        "get_world_size": lambda group=None: world_size,
        "all_reduce": all_reduce,
    }.items():
        monkeypatch.setattr(dist, name, function)
