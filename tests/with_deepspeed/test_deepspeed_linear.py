"""Linear layers under ZeRO-3: the bits of DeepSpeed's function, which holds no gathered weight."""

import itertools

import pytest
import torch
from torch.utils.checkpoint import checkpoint

SHAPES = [(5,), (3, 5), (2, 3, 5), (2, 2, 3, 5)]


@pytest.fixture(scope="module")
def functions():
    """DeepSpeed's, and the one in its place."""
    from deepspeed.runtime.zero.linear import zero3_linear_wrap
    from stepwell.deepspeed.zero.linear import linear_for

    theirs = getattr(zero3_linear_wrap, "stepwell_original", zero3_linear_wrap)
    return theirs, linear_for(theirs)


def operands(shape, *, has_bias, dtype=torch.float32):
    generator = torch.Generator().manual_seed(0)
    made = [torch.randn(size, generator=generator) for size in (shape, (4, 5), (4,))]
    return [each.to(dtype) for each in made[: 2 + has_bias]]


def computed(function, tensors, needs, *, autocast=None, autocast_backward=None):
    """The output, its gradients, and the gradients of a sum of those."""
    leaves = [each.clone().requires_grad_(need) for each, need in zip(tensors, needs, strict=True)]
    wanted = [each for each in leaves if each.requires_grad]
    with torch.autocast("cpu", enabled=autocast is not None, dtype=autocast):
        output = function(*leaves)
    is_backward_cast = autocast_backward is not None
    with torch.autocast("cpu", enabled=is_backward_cast, dtype=autocast_backward):
        scaled = output.float() * torch.arange(output.numel()).view_as(output)
        grads = torch.autograd.grad(scaled.sum(), wanted, create_graph=True)
    total = sum(each.float().square().sum() for each in grads)
    again = torch.autograd.grad(total, wanted, allow_unused=True) if total.requires_grad else ()
    return [output, *grads, *(each for each in again if each is not None)]


def assert_equal(functions, tensors, needs, **casts):
    theirs, ours = (computed(function, tensors, needs, **casts) for function in functions)
    assert [each.dtype for each in ours] == [each.dtype for each in theirs]
    assert all(map(torch.equal, ours, theirs))
    assert len(ours) == len(theirs)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("has_bias", [False, True])
def test_outputs_and_gradients_have_the_bits_of_deepspeeds(functions, shape, has_bias):
    for dtype in (torch.float32, torch.bfloat16):
        tensors = operands(shape, has_bias=has_bias, dtype=dtype)
        for needs in itertools.product([False, True], repeat=len(tensors)):
            if any(needs):
                assert_equal(functions, tensors, needs)


def test_the_backward_casts_as_the_forward_did(functions):
    for casts in itertools.product([None, torch.bfloat16], repeat=2):
        tensors = operands((2, 3, 5), has_bias=True)
        named = dict(zip(("autocast", "autocast_backward"), casts, strict=True))
        assert_equal(functions, tensors, [True] * 3, **named)


def test_the_graph_holds_the_parameter_and_no_view_of_its_weight(functions):
    weight = torch.nn.Parameter(torch.randn(4, 5))
    output = functions[1](torch.randn(3, 5), weight)
    assert output.grad_fn.saved_tensors[1] is weight


class Gathered(torch.nn.Parameter):
    """Partitioned until it is gathered."""

    calls = ()

    def all_gather(self):
        self.calls += ("gather",)
        self.data = self.whole

    def partition(self):
        self.calls += ("partition",)
        self.data = torch.empty(0)


@pytest.mark.parametrize("fails", [False, True])
def test_a_weight_that_is_partitioned_is_gathered_for_the_backward(functions, fails):
    from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus

    weight = Gathered(torch.randn(4, 5))
    weight.whole, weight.ds_status = weight.data, ZeroParamStatus.AVAILABLE
    inputs = torch.randn(3, 5, requires_grad=True)
    output = functions[1](inputs, weight)
    weight.ds_status = ZeroParamStatus.NOT_AVAILABLE
    expected = torch.ones(3, 4) @ weight.whole
    weight.data = torch.empty(0)
    if fails:
        weight.whole = torch.empty(1, 1)
        with pytest.raises(RuntimeError):
            torch.autograd.grad(output.sum(), inputs)
    else:
        assert torch.equal(torch.autograd.grad(output.sum(), inputs)[0], expected)
    assert weight.calls == ("gather", "partition")


def checkpointed(function, tensors, needs):
    """As `computed`, within an activation checkpoint; and the names of the graph's nodes."""
    leaves = [each.clone().requires_grad_(need) for each, need in zip(tensors, needs, strict=True)]
    made = []

    def forward(inputs, *others):
        made.append(function(inputs * 1, *others))
        return made[-1].sin()

    output = checkpoint(forward, *leaves, use_reentrant=False)
    scaled = output.float() * torch.arange(output.numel()).view_as(output)
    grads = torch.autograd.grad(scaled.sum(), [each for each in leaves if each.requires_grad])
    kinds = [each.grad_fn.name() for each in made if each.grad_fn is not None]
    return [output, *grads], kinds


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("has_bias", [False, True])
def test_in_a_checkpoint_layers_have_the_bits_of_deepspeeds(functions, shape, has_bias):
    for dtype in (torch.float32, torch.bfloat16):
        tensors = operands(shape, has_bias=has_bias, dtype=dtype)
        for needs in itertools.product([False, True], repeat=len(tensors)):
            if not any(needs):
                continue
            (theirs, _), (ours, kinds) = (
                checkpointed(function, tensors, needs) for function in functions
            )
            assert all(map(torch.equal, ours, theirs))
            assert [each.stride() for each in ours] == [each.stride() for each in theirs]
            is_torchs = dtype == torch.bfloat16 and not has_bias
            assert is_torchs != any("LinearFunction" in kind for kind in kinds)
