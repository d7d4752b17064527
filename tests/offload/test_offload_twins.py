"""The host sides of parameters: their memory."""

import pytest
import torch
from stepwell.store.twins import Twins
from torch.nn import Parameter

SHAPES = [(5, 3), (), (0, 4), (70,)]


def made(**options):
    params = [
        Parameter(torch.randn(shape).to(dtype))
        for shape in SHAPES
        for dtype in (torch.float32, torch.bfloat16)
    ]
    twins = Twins(**options)
    with torch.no_grad():
        twins.add(params)
    return params, twins


@pytest.mark.parametrize("have_gradients", [True, False])
def test_each_has_memory_of_its_own(have_gradients):
    params, twins = made(have_gradients=have_gradients)
    assert (list(twins), len(twins)) == (params, len(params))
    # 64 bytes where they fit, and none of nothing.
    nbytes = 64 + 64 + 64 + 64 + 0 + 0 + 320 + 192
    assert twins.nbytes(params) == twins.total_nbytes == nbytes * (2 if have_gradients else 1)
    taken = set()
    for param in params:
        weight, grad = twins.weight(param), twins.grad(param)
        assert torch.equal(weight, param)
        assert param in twins
        assert twins.get(param) is twins[param]
        assert twins[param].weight is weight
        assert (grad.shape, grad.dtype) == (param.shape, param.dtype)
        for each in (weight, grad) if have_gradients else (weight,):
            assert each.data_ptr() % 64 == 0
            addresses = set(range(each.data_ptr(), each.data_ptr() + each.nbytes))
            assert not addresses & taken
            taken |= addresses


def test_memory_is_freed_with_the_last_that_was_added_with_it():
    params, twins = made()
    later = Parameter(torch.ones(3))
    with torch.no_grad():
        twins.add([later])
    assert len(twins.buffers) == 4
    twins.remove([later, later])
    assert later not in twins
    assert twins.get(later) is None
    assert len(twins.buffers) == 2
    twins.remove(params[1:])
    assert len(twins.buffers) == 2
    twins.remove(params[:1])
    assert twins.buffers == []
    assert twins.total_nbytes == 0


@torch.no_grad()
def test_the_memory_of_some_is_whole_pages():
    params = [Parameter(torch.randn(numel)) for numel in (1024, 1025, 0, 3)]
    twins = Twins(is_paged=True)
    twins.add(params[:3])
    twins.add(params[3:])
    weights, grads = twins[params[0]].buffers
    others = twins[params[3]].buffers
    assert twins.byte_ranges(params, "weight") == [(weights, 0, 3 * 4096), (others[0], 0, 4096)]
    assert twins.byte_ranges(params[1:], "grad") == [(grads, 4096, 3 * 4096), (others[1], 0, 4096)]
    # What is between them belongs to neither.
    assert twins.byte_ranges(params[::3], "grad") == [(grads, 0, 4096), (others[1], 0, 4096)]
    assert Twins(have_gradients=False).byte_ranges([], "grad") == []
