"""Tensors that a step writes, where what waits for them goes."""

import pytest
import torch
from stepwell.offload.writes import Writes, Written


class Owner:
    def wait(self, parts):
        raise AssertionError("it is gone")


def protected(finish):
    owner = Owner()
    writes = Writes(owner.wait, finish)
    tensor = torch.zeros(3)
    writes.protect({tensor: "a part"})
    assert type(tensor) is Written
    return writes, tensor


def test_where_the_owner_is_gone_the_whole_step_is_waited_for():
    waited = []
    writes, tensor = protected(lambda: waited.append(True))
    assert tensor.sum() == 0
    assert waited == [True]
    assert type(tensor) is torch.Tensor
    assert not writes


def test_a_step_that_fails_where_the_owner_is_gone_raises():
    def fail():
        raise OSError("the step has failed")

    writes, tensor = protected(fail)
    for _ in range(2):
        with pytest.raises(OSError, match="has failed"):
            tensor.sum()
    assert writes
