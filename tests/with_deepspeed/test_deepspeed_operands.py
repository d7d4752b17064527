"""What ZeRO's base optimizers step on the offload engine, without DeepSpeed and without ZeRO.

Norms, which optimizers are taken, and what a step asks of them.
"""

from functools import partial

import pytest
import stepwell
import torch
from partition_cases import opened
from stepwell.deepspeed.native import adam
from stepwell.deepspeed.zero.operands import (
    Operands,
    global_norm,
    gradient_scale,
    is_torchs,
    obstacle_of,
)
from stepwell.deepspeed.zero.partition import Fragment, Partition
from torch.nn import Parameter

FLOAT32_MAX = torch.finfo(torch.float32).max

# ---- norms ----


def test_a_norm_beyond_float32_clips_too():
    assert gradient_scale(1e60, 1.0, 1.0) == pytest.approx(1e-60, rel=1e-12)
    assert gradient_scale(FLOAT32_MAX, 1.0, FLOAT32_MAX) == 1.0


@pytest.mark.parametrize(
    ("norm", "loss_scale", "expected", "dtype"),
    [
        (8.0, 2.0, 4.0, torch.float32),
        (0.0, 1.0, 0.0, torch.float32),
        (FLOAT32_MAX, 1.0, FLOAT32_MAX, torch.float32),
        (2.0 * FLOAT32_MAX, 1.0, 2.0 * FLOAT32_MAX, torch.float64),
        (2.0 * FLOAT32_MAX, 4.0, FLOAT32_MAX / 2.0, torch.float32),
        (float("inf"), 1.0, float("inf"), torch.float32),
    ],
)
def test_the_global_norm_is_unscaled(norm, loss_scale, expected, dtype):
    found = global_norm(norm, loss_scale)
    assert (found.dtype, found.shape, found.device.type) == (dtype, (), "cpu")
    assert found.item() == expected
    assert global_norm(float("nan"), 1.0).isnan()


# ---- which optimizers ----


class CPUAdam(torch.optim.Optimizer):
    """What the engine asks of DeepSpeedCPUAdam."""

    def __init__(self, params, *, adam_w_mode=True, fp32_optimizer_states=True, **options):
        defaults = {"lr": 1e-2, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.01}
        super().__init__(params, {**defaults, "bias_correction": True, **options})
        self.adam_w_mode, self.fp32_optimizer_states = adam_w_mode, fp32_optimizer_states


def parameter(numel=37, dtype=torch.float32):
    return Parameter(torch.linspace(-1, 1, numel).to(dtype))


@pytest.mark.parametrize("kind", [torch.optim.Adam, torch.optim.AdamW])
def test_torchs_own_are_taken_with_what_is_done(kind):
    optimizer = kind([parameter()], maximize=True, weight_decay=0.1)
    assert is_torchs(optimizer)
    assert obstacle_of(optimizer, ()) is None
    for name in ("amsgrad", "capturable", "differentiable"):
        optimizer = kind([parameter()])
        optimizer.add_param_group({"params": [parameter()], name: True})
        said = f"the optimizer is torch's `{kind.__name__}` with {name}"
        assert obstacle_of(optimizer, ()) == said


def test_kinds_that_are_not_known_are_named():
    class Mine(torch.optim.AdamW):
        pass

    assert not is_torchs(Mine([parameter()]))
    assert obstacle_of(torch.optim.SGD([parameter()]), ()) == "the optimizer is `SGD`"
    said = "the optimizer is `Mine`, a subclass of AdamW that may step differently"
    assert obstacle_of(Mine([parameter()]), ()) == said
    assert obstacle_of(Mine([parameter()]), (Mine,)) is None
    # Of those that are known by name nothing is asked that torch's are asked.
    assert obstacle_of(CPUAdam([parameter()], amsgrad=True), (CPUAdam,)) is None


def test_what_would_not_be_called_is_an_obstacle():
    optimizer = torch.optim.AdamW([parameter()])
    torch.optim.lr_scheduler.LambdaLR(optimizer, lambda _: 1.0)
    assert obstacle_of(optimizer, ()) is None
    optimizer.step = lambda: None
    assert obstacle_of(optimizer, ()) == "`step` of the optimizer `AdamW` was replaced"
    for register in ("register_step_pre_hook", "register_step_post_hook"):
        optimizer = torch.optim.AdamW([parameter()])
        handle = getattr(optimizer, register)(lambda *_: None)
        assert obstacle_of(optimizer, ()) == "the optimizer `AdamW` has step hooks"
        handle.remove()
        assert obstacle_of(optimizer, ()) is None


# ---- steps ----


def stepped(optimizer, param, *, rank=0, ordinal=0):
    """The parameter as the only partition of an engine, once that has stepped it."""
    weight = torch.zeros(param.numel(), dtype=torch.bfloat16)
    partitions = opened(Partition(param, weight, torch.float32, 0))
    operands, fragment = Operands(optimizer, rank), Fragment(0, 0, param.numel())
    for index in range(3):
        grad = torch.linspace(1, 3, param.numel()) * (index + 1)
        partitions.gradients.collect(fragment, grad, is_owned=True, is_last=True)
        partitions.end_last_step()
        found = {0: operands.of(0, ordinal, param)}
        prepared = partitions.prepare(found, [weight])
        partitions.submit(prepared, grad_scale=1.0, begun=operands.begun(found.values()))
        operands.note_step()
        partitions.forget()
    partitions.complete()
    return param


def test_ranks_and_partitions_round_in_their_own_ways():
    found = []
    for rank, ordinal in ((0, 0), (0, 1), (1, 0), (0, 0)):
        param = parameter(1000)
        optimizer = stepwell.AdamW([param], moments="bf16")
        stepped(optimizer, param, rank=rank, ordinal=ordinal)
        found.append(optimizer.state[param]["exp_avg"].view(torch.int16))
    same = [torch.equal(found[0], each) for each in found]
    assert same == [True, False, False, True]


def test_options_of_torch_s_that_come_later_are_refused():
    param = parameter()
    optimizer = torch.optim.AdamW([param])
    optimizer.param_groups[0]["amsgrad"] = True
    with pytest.raises(
        ValueError, match=r"`amsgrad` is set for the group of partition 7(.|\n)*hint"
    ):
        Operands(optimizer, 0).of(0, 7, param)
    assert not optimizer.state


def test_states_that_share_a_count_count_once():
    """As a universal checkpoint leaves them."""
    params = [parameter(), parameter()]
    optimizer = torch.optim.AdamW(params)
    count = torch.tensor(4.0)
    for param in params:
        moments = {name: torch.zeros(37) for name in ("exp_avg", "exp_avg_sq")}
        optimizer.state[param] = {"step": count, **moments}
    weights = [torch.zeros(37, dtype=torch.bfloat16) for _ in params]
    partitions = opened(
        *(Partition(*each, torch.float32, 0) for each in zip(params, weights, strict=True))
    )
    operands = Operands(optimizer, 0)
    found = {group: operands.of(0, group, param) for group, param in enumerate(params)}
    prepared = partitions.prepare(found, weights)
    partitions.submit(prepared, grad_scale=1.0, begun=operands.begun(found.values()))
    partitions.complete()
    assert [int(optimizer.state[param]["step"]) for param in params] == [5, 5]


@pytest.mark.parametrize("register", ["register_step_pre_hook", "register_step_post_hook"])
def test_hooks_that_come_later_are_told_of_once(register, caplog):
    param = parameter()
    optimizer = torch.optim.AdamW([param])
    stepped(optimizer, param)
    assert not caplog.messages
    getattr(optimizer, register)(lambda *_: None)
    operands = Operands(optimizer, 0)
    for _ in range(2):
        operands.note_step()
    (said,) = caplog.messages
    assert "step hooks of the optimizer `AdamW` are not called" in said


# ---- beside the step ----


@pytest.mark.parametrize(
    ("make", "dtype", "nbytes"),
    [
        (CPUAdam, torch.float32, 8),
        (CPUAdam, torch.bfloat16, 8),
        (partial(CPUAdam, fp32_optimizer_states=False), torch.bfloat16, 4),
        (torch.optim.AdamW, torch.float32, 8),
        (torch.optim.AdamW, torch.bfloat16, 4),
        (stepwell.AdamW, torch.float32, 8),
        (partial(stepwell.AdamW, moments="bf16"), torch.float32, 4),
    ],
)
def test_bytes_of_moments(make, dtype, nbytes):
    param = parameter(64, dtype)
    assert Operands(make([param]), 0).moments_bytes(param) == 64 * nbytes


@pytest.mark.parametrize("policy", ["skip", "propagate", "raise"])
def test_what_is_not_finite(policy):
    operands = Operands(stepwell.AdamW([parameter()], nonfinite=policy), 0)
    if policy == "raise":
        with pytest.raises(ValueError, match=r"a gradient is not finite(.|\n)*hint"):
            operands.skips_nonfinite()
    else:
        assert operands.skips_nonfinite() is (policy == "skip")


def test_what_is_not_finite_under_optimizers_of_others():
    optimizer = CPUAdam([parameter()])
    with pytest.raises(ValueError, match="a gradient is not finite"):
        Operands(optimizer, 0).skips_nonfinite()
    adam.propagate_in(optimizer)
    assert Operands(optimizer, 0).skips_nonfinite() is False
