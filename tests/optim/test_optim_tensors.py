"""Which tensors a step takes, where they lie, and whether two of them share memory."""

import pytest
import torch
from stepwell import _core
from stepwell._grads import checked_grad
from stepwell._tensors import (
    Written,
    check_memory,
    check_param,
    contiguous_hint,
    is_run,
    view,
)
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.testing._internal.two_tensor import TwoTensor


def placed(shape, stride, numel=16):
    return torch.zeros(numel).as_strided(shape, stride)


def wrapper(numel):
    """A tensor of a class that holds other tensors, and has no memory of its own."""
    return TwoTensor(torch.ones(numel), torch.ones(numel))


def on_an_accelerator(numel):
    with FakeTensorMode():
        return torch.nn.Parameter(torch.empty(numel, device="cuda"))


def label():
    return "this"


def test_a_view_has_what_is_asked_for():
    values = torch.arange(6.0)
    assert (view(values).dtype, view(values).numel, view(values, 2).numel) == ("float32", 6, 2)
    assert _core.grad_stats([view(values, 2)], norm=False).absmax == 1


def test_a_run_reads_as_it_lies():
    values = torch.ones(2, 3)
    assert is_run(values)
    assert is_run(torch.empty(0))
    assert not is_run(values.t())
    assert not is_run(torch._neg_view(values))
    for numel in (1, 3):
        assert not is_run(torch._efficientzerotensor((numel,)))


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.ones(1).expand(3),
        lambda: torch._efficientzerotensor((3,)),
        lambda: torch._efficientzerotensor((1,)).expand(3),
        lambda: wrapper(3),
        lambda: torch.empty(0),
    ],
    ids=["expanded", "zero", "expanded-zero", "wrapper", "empty"],
)
def test_less_memory_than_elements_is_no_freed_memory(make):
    check_memory(make(), label)


def test_freed_memory_is_named():
    values = torch.ones(3)
    values.untyped_storage().resize_(0)
    with pytest.raises(ValueError, match="this takes `12` bytes, but its storage has `0`"):
        check_memory(values, label)


# ---- parameters and gradients ----


@pytest.mark.parametrize("check", ["param", "grad"])
@pytest.mark.parametrize(
    ("make", "pattern"),
    [
        (lambda: torch.eye(3).to_sparse(), "this is `sparse_coo`"),
        (lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]), "this is `nested`"),
        (
            lambda: torch.nested.nested_tensor([torch.ones(2)], layout=torch.jagged),
            "this is `nested`",
        ),
        (lambda: on_an_accelerator(3), "this is on `cuda:0`, expected"),
        (lambda: torch.ones(3, dtype=torch.float64), "this is `torch.float64`"),
    ],
    ids=["sparse", "nested", "jagged", "accelerator", "float64"],
)
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_what_no_step_takes_is_refused(check, make, pattern):
    with pytest.raises(ValueError, match=pattern):
        if check == "param":
            check_param(make(), "this")
        else:
            checked_grad(torch.ones(3), make(), label, takes_any_float=True)


@pytest.mark.parametrize("on_device", [False, True])
@pytest.mark.parametrize("numel", [1, 3])
def test_a_parameter_needs_memory_of_its_own(on_device, numel):
    with pytest.raises(ValueError, match=r"this has no memory of its own .*unwrap it"):
        check_param(wrapper(numel), "this", on_device=on_device)


@pytest.mark.filterwarnings("ignore:Accessing the data pointer of FakeTensor")
def test_on_a_device_a_parameter_may_lie_there():
    # A fake one has no memory.
    with pytest.raises(ValueError, match="this has no memory of its own"):
        check_param(on_an_accelerator(3), "this", on_device=True)


def test_on_a_device_rows_lie_one_after_the_other():
    check_param(torch.ones(2, 3), "this", on_device=True)
    check_param(torch.ones(2, 3).t(), "this")
    with pytest.raises(ValueError, match=r"this is not contiguous \(strides `\(1, 3\)`\)"):
        check_param(torch.ones(2, 3).t(), "this", on_device=True)


@pytest.mark.parametrize("dim", range(2, 7))
def test_channels_last_has_a_hint_of_its_own(dim):
    hint = contiguous_hint(torch.ones([2] * dim))
    assert ("channels_last" in hint) == (dim in {4, 5})


@pytest.mark.parametrize(
    ("shape", "stride"),
    [((3,), (0,)), ((2,), (0,)), ((2, 2), (1, 1)), ((3, 3), (2, 2)), ((3, 3), (1, 2))],
)
def test_a_parameter_that_holds_an_element_twice_is_refused(shape, stride):
    with pytest.raises(ValueError, match="this holds the same element more than once"):
        check_param(placed(shape, stride), "this")


@pytest.mark.parametrize(
    ("shape", "stride"),
    [
        ((4, 3), (1, 4)),
        ((2, 3), (1, 5)),
        # Its rows interleave.
        ((2, 3), (3, 2)),
        ((1, 3), (0, 1)),
        ((1, 3), (1, 1)),
        ((0, 3, 3), (9, 1, 1)),
    ],
)
def test_a_parameter_that_holds_each_element_once_is_taken(shape, stride):
    check_param(placed(shape, stride), "this")


# ---- what steps write ----

WHOLE = torch.zeros(12)


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (WHOLE, WHOLE),
        (WHOLE, WHOLE[3:4]),
        (WHOLE[:3], WHOLE[2:]),
        # Only their last elements meet.
        (WHOLE[:8:2], WHOLE[6:9]),
        (WHOLE[0::2], WHOLE[4::3]),
        (WHOLE, WHOLE[1::2]),
    ],
)
def test_tensors_that_share_an_element_are_named(first, second):
    for names in (("one", "other"), ("other", "one")):
        with pytest.raises(ValueError, match=r"(one|other) shares memory with (one|other)"):
            Written(zip(names, (first, second), strict=True))


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (WHOLE[:6], WHOLE[6:]),
        (WHOLE[0::2], WHOLE[1::2]),
        (WHOLE[0::2], WHOLE[3:4]),
        (WHOLE, WHOLE[4:4]),
        (torch.empty(3, 0), torch.empty(3, 0)),
    ],
)
def test_tensors_that_share_no_element_may_lie_together(first, second):
    Written([("one", first), ("other", second)])
    Written([("one", second), ("other", first)])


def test_the_owner_of_a_gradients_memory():
    written = Written([("one", WHOLE[1:4]), ("other", WHOLE[6:8]), ("gaps", WHOLE[8::2])])
    owners = [written.owner_of(WHOLE[index : index + 1]) for index in range(12)]
    assert owners == [None, *["one"] * 3, None, None, *["other"] * 2, *[None] * 4]
    assert written.owner_of(WHOLE[4:6]) is None
    assert written.owner_of(WHOLE[2:2]) is None
    assert written.owner_of(WHOLE) == "other"
    assert Written([]).owner_of(WHOLE) is None
