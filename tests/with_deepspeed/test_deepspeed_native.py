"""DeepSpeed's native ops over the core, without DeepSpeed.

Arithmetic, checks, steps of an optimizer.
"""

import math
from contextlib import contextmanager

import pytest
import torch
from deepspeed_tensors import HYPER, OPTIMIZER, assert_unchanged, tensors, update
from stepwell.deepspeed.native import adam, cpu_adam, fused_adam, step_guard

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


def test_numbers_may_be_ints_and_tensors():
    one, other = tensors(), tensors()
    update(torch.tensor(1.0), one, lr=1, weight_decay=0, eps=1, bias_correction=1)
    update(1, other, lr=torch.tensor(1.0), weight_decay=0.0, eps=1.0, bias_correction=True)
    assert_unchanged(one, other)


def test_empty_tensors_are_stepped():
    assert update(1, tensors(numel=0)) == 0


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


# ---- steps of an optimizer ----


class CountingFirst(torch.optim.Optimizer):
    """Counts before it updates, as DeepSpeedCPUAdam does."""

    def __init__(self, params):
        super().__init__(params, {"lr": 1e-3})
        self.fails_at = None

    @step_guard.whole
    def step(self, closure=None):
        for group in self.param_groups:
            for index, param in enumerate(group["params"]):
                state = self.state[param]
                if not state:
                    state |= {
                        "step": 0,
                        "exp_avg": torch.zeros_like(param),
                        "exp_avg_sq": torch.zeros_like(param),
                    }
                state["step"] += 1
                if index == self.fails_at:
                    raise KeyboardInterrupt
                update(
                    state["step"],
                    [param.detach(), param.grad, state["exp_avg"], state["exp_avg_sq"]],
                )


def counting_first(num_params=3):
    params = [torch.nn.Parameter(tensors(seed=seed)[0]) for seed in range(num_params)]
    for seed, param in enumerate(params):
        param.grad = tensors(seed=seed)[1]
    return CountingFirst(params), params


def test_a_step_with_one_bad_gradient_updates_and_counts_nothing():
    optimizer, params = counting_first()
    optimizer.step()
    good = params[2].grad.clone()
    params[2].grad[7] = math.nan
    values = [
        tensor for p in params for tensor in (p.detach(), *list(optimizer.state[p].values())[1:])
    ]
    with refused_and_unchanged(values, "not finite"):
        optimizer.step()
    assert [optimizer.state[param]["step"] for param in params] == [1, 1, 1]
    params[2].grad = good
    optimizer.state[params[2]]["exp_avg"] = torch.zeros(1000, dtype=torch.float16)
    with refused_and_unchanged(values, "the moments of a"):
        optimizer.step()
    assert [optimizer.state[param]["step"] for param in params] == [1, 1, 1]


@pytest.mark.parametrize("steps_before", [0, 1])
def test_an_interrupted_step_counts_what_was_applied(steps_before):
    optimizer, params = counting_first()
    for _ in range(steps_before):
        optimizer.step()
    optimizer.fails_at = 1
    with pytest.raises(KeyboardInterrupt):
        optimizer.step()
    steps = [
        optimizer.state[param].get("step", 0) if param in optimizer.state else 0 for param in params
    ]
    assert steps == [steps_before + 1, steps_before, steps_before]


def test_the_closure_of_a_step_is_called_once_before_the_check():
    optimizer, params = counting_first(1)
    calls = []

    def closure():
        calls.append(torch.is_grad_enabled())
        params[0].grad = torch.full((1000,), math.inf if len(calls) == 2 else 1.0)
        return 42.0

    assert optimizer.step(closure) == 42.0
    assert calls == [True]
    with pytest.raises(ValueError, match="not finite"):
        optimizer.step(closure=closure)
    assert calls == [True, True]
