"""Linear layers under ZeRO-3: torch's own within checkpoints, with the bits of DeepSpeed's."""

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


def checkpointed(function, tensors, needs):
    """The output and its gradients within a checkpoint; and the names of the graph's nodes."""
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
