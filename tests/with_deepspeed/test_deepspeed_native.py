"""DeepSpeed's native ops over the core, without DeepSpeed.

Arithmetic and checks. `test_deepspeed_register` has steps of DeepSpeedCPUAdam.
"""

import math
from contextlib import contextmanager

import pytest
import torch
from deepspeed_tensors import HYPER, OPTIMIZER, assert_unchanged, tensors, update
from stepwell.deepspeed.native import adam, cpu_adam, fused_adam

# One fp32 rounding of each of p, m and v per step, and ours of the bias corrections against
# torch's.
FP32_RTOL = 2e-6
# Where terms of up to .2 cancel, a rounding of theirs remains.
FP32_ATOL = 2e-8
# A stored 16-bit value is rounded to nearest from a result that differs by FP32_RTOL: at most one
# unit in the last place.
ULP_RTOL = {torch.float32: FP32_RTOL, torch.bfloat16: 2**-7, torch.float16: 2**-10}


@pytest.fixture(autouse=True)
def optimizer():
    cpu_adam.create_adam(OPTIMIZER, 1e-3, 0.9, 0.999, 1e-8, 0, True, False)
    adam.set_nonfinite("raise")
    yield
    adam.set_nonfinite("raise")
    cpu_adam.destroy_adam(OPTIMIZER)


def reference(step, quad, *, decoupled=True, lr, beta1, beta2, eps, weight_decay, bias_correction):
    """Adam in float64, rounded to the dtypes of the tensors."""
    param, grad, m, v = (tensor.double() for tensor in quad)
    if decoupled:
        param = param * (1 - lr * weight_decay)
    else:
        grad = grad + weight_decay * param
    m = beta1 * m + (1 - beta1) * grad
    v = beta2 * v + (1 - beta2) * grad * grad
    correction1, correction2 = (1 - beta1**step, 1 - beta2**step) if bias_correction else (1, 1)
    param = param - lr / correction1 * m / (v.sqrt() / math.sqrt(correction2) + eps)
    return [param.to(quad[0].dtype), quad[1], m.to(quad[2].dtype), v.to(quad[3].dtype)]


@contextmanager
def refused_and_unchanged(quad, match):
    before = [tensor.clone() for tensor in quad]
    with pytest.raises(ValueError, match=match) as caught:
        yield
    assert "hint: " in str(caught.value)
    assert_unchanged(
        [tensor.contiguous() for tensor in quad], [tensor.contiguous() for tensor in before]
    )


@pytest.mark.parametrize(
    ("dtype", "moments"),
    [
        (torch.float32, torch.float32),
        (torch.bfloat16, torch.float32),
        (torch.bfloat16, torch.bfloat16),
        (torch.float16, torch.float32),
        (torch.float16, torch.float16),
    ],
)
@pytest.mark.parametrize("decoupled", [True, False])
@pytest.mark.parametrize("bias_correction", [True, False])
def test_update_is_adam(dtype, moments, decoupled, bias_correction):
    cpu_adam.create_adam(OPTIMIZER, 1e-3, 0.9, 0.999, 1e-8, 0, decoupled, False)
    quad = tensors(dtype=dtype, moments=moments)
    expected = reference(
        7, quad, decoupled=decoupled, **(HYPER | {"bias_correction": bias_correction})
    )
    assert update(7, quad, bias_correction=bias_correction) == 0
    for ours, theirs in zip(quad, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=ULP_RTOL[ours.dtype], atol=FP32_ATOL)


@pytest.mark.parametrize("index", [0, 2, 3])
def test_what_is_written_must_be_contiguous(index):
    quad = [tensor.view(20, 50) for tensor in tensors()]
    quad[index] = quad[index].t()
    with refused_and_unchanged(quad, "is not contiguous"):
        update(1, quad)


def test_a_gradient_of_any_strides():
    quad, other = ([tensor.view(20, 50) for tensor in tensors()] for _ in range(2))
    quad[1] = torch.empty(50, 20).t().copy_(quad[1])
    assert not quad[1].is_contiguous()
    update(3, quad)
    update(3, other)
    assert_unchanged([quad[0], *quad[2:]], [other[0], *other[2:]])


WRONG = {
    "numel": (lambda quad: quad.__setitem__(1, quad[1][:-1]), "`grad` has `999` elements"),
    "moment numel": (
        lambda quad: quad.__setitem__(3, quad[3][:10]),
        "`exp_avg_sq` has `10` elements",
    ),
    "grad dtype": (
        lambda quad: quad.__setitem__(1, quad[1].bfloat16()),
        "`grad` is `torch.bfloat16`",
    ),
    "param dtype": (
        lambda quad: quad.__setitem__(0, quad[0].double()),
        "`param` is `torch.float64`",
    ),
    "moment dtype": (
        lambda quad: quad.__setitem__(2, quad[2].half()),
        "the moments of a `torch.float32`",
    ),
    "device": (lambda quad: quad.__setitem__(0, quad[0].to("meta")), "`param` is on `meta`"),
    "sparse": (
        lambda quad: quad.__setitem__(1, quad[1].to_sparse()),
        "`grad` is `torch.sparse_coo`",
    ),
    "none": (lambda quad: quad.__setitem__(1, None), "`grad` is `NoneType`"),
}


@pytest.mark.parametrize("what", WRONG)
def test_wrong_tensors(what):
    spoil, match = WRONG[what]
    quad = tensors()
    kept = list(quad)
    spoil(quad)
    with refused_and_unchanged(kept, match):
        update(1, quad)


@pytest.mark.parametrize("step", [0, -1, 1.5])
def test_wrong_step(step):
    quad = tensors()
    with refused_and_unchanged(quad, "`step` is"):
        update(step, quad)


def test_unknown_optimizer():
    quad = tensors()
    with refused_and_unchanged(quad, "there is no optimizer `4711`"):
        update(1, quad, optimizer=4711)
    cpu_adam.destroy_adam(4711)


@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
def test_a_nonfinite_gradient_changes_nothing(value):
    quad = tensors()
    quad[1][123] = value
    with refused_and_unchanged(quad, "a gradient is not finite"):
        update(1, quad)
    adam.set_nonfinite("propagate")
    update(1, quad)
    assert not quad[0][123].isfinite()


def test_fused_is_all_or_nothing():
    quads = [tensors(seed=seed) for seed in range(3)]
    alone = [tensors(seed=seed) for seed in range(3)]
    numbers = (1e-3, 0.9, 0.999, 1e-8, 4, 1, 1, 0.01)

    def step(quads):
        grads_first = [
            list(column) for column in zip(*((g, p, m, v) for p, g, m, v in quads), strict=True)
        ]
        fused_adam.multi_tensor_adam(2048, torch.zeros(1, dtype=torch.int), grads_first, *numbers)

    step(quads)
    for quad, other in zip(quads, alone, strict=True):
        update(4, other)
        assert_unchanged(quad, other)
    quads[2][1][0] = math.inf
    with refused_and_unchanged([tensor for quad in quads for tensor in quad], "not finite"):
        step(quads)
