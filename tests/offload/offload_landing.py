"""What the tests of the guard share: parameters under way, and uploads that land late."""

import ctypes

import torch
from stepwell.access.guard import WeightGuard
from torch.nn import Parameter

SIZE = 4


class Landing:
    """Uploads that land as late as they may: when they are waited for."""

    def __init__(self, is_last_step=True):
        self.new = {}
        self.is_last_step = is_last_step
        self.waits = []

    def wait(self, params, /):
        params = list(params)
        self.waits.append(len(params))
        for param in params:
            self._land(param)
        return self.is_last_step

    def finish(self):
        self.waits.append("finish")
        for param in list(self.new):
            self._land(param)

    def send(self, params, new):
        """To where `params` are now."""
        for param, weight in zip(params, new, strict=True):
            self.new[param] = param.untyped_storage(), weight.untyped_storage()

    def _land(self, param):
        if param in self.new:
            memory, weight = self.new.pop(param)
            # Not by torch, which may be within a transform.
            ctypes.memmove(memory.data_ptr(), weight.data_ptr(), memory.nbytes())


def old_and_new(count=2):
    torch.manual_seed(0)
    return [Parameter(torch.randn(SIZE, SIZE)) for _ in range(count)], [
        torch.randn(SIZE, SIZE) for _ in range(count)
    ]


def parameters_under_way(is_last_step):
    """For a fixture: two parameters, their guard, what lands, and the same with all landed."""
    params, new = old_and_new()
    uploads = Landing(is_last_step)
    guard = WeightGuard(uploads)
    uploads.send(params, new)
    guard.protect(params)
    landed = [Parameter(weight.clone()) for weight in new]
    yield params, guard, uploads, landed
    guard.clear(guard.num_steps)
    assert all(type(param) is Parameter for param in params)


def flat(found):
    return list(found) if isinstance(found, (tuple, list)) else [found]


class Later(torch.nn.Module):
    """A module that is made of a parameter of another."""

    def __init__(self, weight):
        super().__init__()
        self.weight = weight

    def forward(self, x):
        return x @ self.weight
