"""Methods of ZeRO-3's optimizer, each by itself: its step.

As `zero_1_2_stand_ins.py`.
"""

import contextlib
import math
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from stand_in_optimizers import (
    Gathers,
    Timers,
    assert_failed_drop_is_said,
    noted,
    optimizer_of,
    several,
)
from stepwell.deepspeed.zero import stage_3
from stepwell.deepspeed.zero.backward import Backward
from stepwell.deepspeed.zero.norm_round import NormRound
from stepwell.deepspeed.zero.operands import Operand
from stepwell.deepspeed.zero.stage_3 import OffloadZeroOptimizerStage3

BF16 = torch.bfloat16


def made(**fields):
    return optimizer_of(OffloadZeroOptimizerStage3, fields)


# ---- steps ----


def stepping(monkeypatch, norm=3.0, *, world_size=1, swapped=None, gathers=False, **more):
    """An optimizer whose step notes its parts, and what it notes."""
    several(monkeypatch, stage_3.dist, world_size=world_size)
    calls = []

    def update_scale():
        calls.append(("scale", optimizer.overflow))
        return optimizer.overflow

    optimizer = made(
        _backward=SimpleNamespace(check=noted(calls, "check"), dropping=contextlib.nullcontext),
        _gathers=Gathers(calls) if gathers else None,
        _norm_round=NormRound(),
        dp_process_group="ranks",
        timers=Timers(),
        loss_scaler=SimpleNamespace(cur_scale=2.0),
        custom_loss_scaler=False,
        clip_grad=0.5,
        _has_left=False,
        _operands=SimpleNamespace(swapped=swapped),
        _partitions=SimpleNamespace(
            gradients=SimpleNamespace(norm=lambda add_up: calls.append("norm") or norm),
            settle=noted(calls, "settled"),
            finish=noted(calls, "finished"),
            device=torch.device("cpu"),
        ),
        _loss_scale_update_and_overflow_cleanup=update_scale,
        _apply=lambda grad_scale: calls.append(("applied", grad_scale)),
        _post_step=calls.append,
        zero_grad=lambda set_to_none: calls.append(("zeroed", set_to_none)),
        **{
            f"_{name}": noted(calls, name)
            for name in (
                "check_failure",
                "pre_step",
                "partition_all_parameters",
                "check_left",
                "check_gathered",
                "drop_gradients",
            )
        },
    )
    vars(optimizer).update(more)
    return optimizer, calls


FIRST = ["check", "check_failure", "pre_step", "partition_all_parameters"]
CHECKS = ["norm", "check_left", "check_gathered"]
# Of norm 3 at a scale of 2: 1.5, clipped to a half.
APPLIED = ("applied", pytest.approx(0.5 / 1.5 / 2, rel=1e-5))


@pytest.mark.parametrize("gathers", [False, True])
def test_a_step_is_applied(monkeypatch, gathers):
    optimizer, calls = stepping(monkeypatch, gathers=gathers)
    optimizer.step()
    applied = ["decided", APPLIED, "told"] if gathers else [APPLIED]
    first = [FIRST[0], "finished", *FIRST[1:]] if gathers else FIRST
    assert calls == [*first, *CHECKS, ("scale", False), *applied, {"optimizer_step"}]
    assert (optimizer.overflow, float(optimizer._global_grad_norm)) == (False, 1.5)
    assert optimizer.timers.ended == ["optimizer_step"]
    # The submit takes it back.
    assert optimizer._has_left is True


@pytest.mark.parametrize("swapped", [None, "volume"])
@pytest.mark.parametrize("world_size", [1, 2])
def test_no_rank_steps_before_all_have_committed(monkeypatch, swapped, world_size):
    optimizer, calls = stepping(monkeypatch, world_size=world_size, swapped=swapped)
    optimizer.step()
    waits = ["finished"] if swapped and world_size > 1 else []
    assert calls[4 : -3 - len(CHECKS)] == waits


@pytest.mark.parametrize("norm", [math.inf, math.nan])
def test_a_step_that_is_skipped_decides_nothing(monkeypatch, norm):
    optimizer, calls = stepping(monkeypatch, norm, gathers=True)
    optimizer.step()
    first = [FIRST[0], "finished", *FIRST[1:]]
    assert calls == [*first, *CHECKS, ("scale", True), "drop_gradients"]
    assert not optimizer.timers.ended
    assert optimizer._has_left is False


@pytest.mark.parametrize("name", ["_check_left", "_check_gathered", "_apply"])
@pytest.mark.parametrize("error", [OSError, KeyboardInterrupt])
def test_a_step_that_raises_leaves_no_gradients(monkeypatch, name, error):
    optimizer, calls = stepping(monkeypatch, **{name: mock.Mock(side_effect=error)})
    with pytest.raises(error):
        optimizer.step()
    assert calls[-3:] == ["settled", ("zeroed", True), "drop_gradients"]


@pytest.mark.parametrize("name", ["zero_grad", "_drop_gradients"])
def test_why_gradients_could_not_be_dropped_is_said_next(monkeypatch, name):
    error = mock.Mock(side_effect=MemoryError("no memory"))
    optimizer, calls = stepping(monkeypatch, _apply=error, _backward=Backward())
    assert_failed_drop_is_said(optimizer, calls, name)


# ---- what ranks tell each other ----


class Order:
    """What a rank has gathered, as ranks add it up."""

    @staticmethod
    def end():
        return [2.0, 4.0]


def adding(monkeypatch, *, world_size, has_left=False, sums=lambda sums: None):
    several(monkeypatch, stage_3.dist, world_size=world_size)
    add = stage_3.dist.all_reduce

    def all_reduce(tensor, op, group):
        add(tensor, op, group)
        sums(tensor)

    monkeypatch.setattr(stage_3.dist, "all_reduce", all_reduce)
    return made(
        _share=SimpleNamespace(squares=lambda: torch.tensor(1.0)),
        _fetcher=SimpleNamespace(gather_order=Order, forget_order=lambda: None),
        dp_process_group="ranks",
        _has_left=has_left,
        _has_parted=False,
        _norm_round=NormRound(),
    )


@pytest.mark.parametrize("has_left", [False, True])
def test_ranks_add_up_norms_and_those_that_have_left(monkeypatch, has_left):
    optimizer = adding(monkeypatch, world_size=3, has_left=has_left)
    squares = torch.tensor(2.0, dtype=torch.float64)
    assert optimizer._add_up(squares) == 9.0
    assert optimizer._num_left == (3.0 if has_left else 0.0)
    assert optimizer._has_parted is False
    # All have left it: nothing was changed.
    optimizer._check_left()
    optimizer._check_gathered()


def test_a_rank_that_cannot_step_ends_the_step_of_the_others(monkeypatch):
    def sums(sums):
        # The one that cannot step has gathered other weights, too.
        sums[1].add_(1.0)
        sums[-1].add_(1.0)

    optimizer = adding(monkeypatch, world_size=2, sums=sums)
    with pytest.raises(OSError, match=r"cannot take this step: 1, so none .* hint: "):
        optimizer._add_up(torch.tensor(2.0))
    assert optimizer._has_parted is False
    # This one cannot, either.
    optimizer._norm_round = mock.Mock(meet=lambda: 1.0)
    optimizer._add_up(torch.tensor(2.0))
    assert optimizer._has_parted is False


@pytest.mark.parametrize("gathers", [False, True])
@pytest.mark.parametrize("place", ["failure", "partition", "finish", "norm"])
def test_what_keeps_a_rank_from_the_norm_is_told_in_it(monkeypatch, place, gathers):
    optimizer, calls = stepping(monkeypatch, swapped="volume", gathers=gathers)
    monkeypatch.setattr(stage_3.dist, "get_world_size", lambda group: 2)
    added = []
    optimizer._add_up = lambda squares: added.append((float(squares), optimizer._norm_round.meet()))
    fail = mock.Mock(side_effect=OSError("mine"))
    if place == "failure":
        optimizer._check_failure = fail
    elif place == "partition":
        optimizer._partition_all_parameters = fail
    elif place == "finish":
        # The one before is of a step that has failed on all ranks.
        optimizer._partitions.finish = mock.Mock(side_effect=[None] * gathers + [OSError("mine")])
    else:
        optimizer._partitions.gradients.norm = fail
    with pytest.raises(OSError, match="mine"):
        optimizer.step()
    assert added == [(0.0, 1.0)]
    assert "check_left" not in calls
    assert ("drop_gradients" in calls) == (place != "failure")


def test_a_step_that_has_failed_on_all_ranks_is_not_told_of(monkeypatch):
    optimizer, calls = stepping(monkeypatch, world_size=2, gathers=True)
    optimizer._partitions.finish = mock.Mock(side_effect=OSError("a rank is gone"))
    optimizer._add_up = noted(calls, "added up")
    with pytest.raises(OSError, match="a rank is gone"):
        optimizer.step()
    assert calls == ["check"]


@pytest.mark.parametrize("num_left", [1.0, 2.0])
def test_some_ranks_have_left_a_step(monkeypatch, num_left):
    optimizer = adding(monkeypatch, world_size=3)
    optimizer._num_left = num_left
    with pytest.raises(OSError, match=rf"^{num_left:.0f} of 3 ranks have left a step by an error"):
        optimizer._check_left()


def test_ranks_that_have_gathered_other_weights_are_told_once(monkeypatch):
    forgotten = []
    optimizer = adding(monkeypatch, world_size=2, sums=lambda sums: sums[-1].add_(1.0))
    optimizer._fetcher.forget_order = noted(forgotten, "forgotten")
    optimizer._add_up(torch.tensor(2.0))
    assert optimizer._has_parted is True
    with pytest.raises(RuntimeError, match="ranks have gathered other weights"):
        optimizer._check_gathered()
    assert forgotten == ["forgotten"]
    optimizer._check_gathered()
    assert forgotten == ["forgotten"]


def test_deepspeeds_hooks_have_no_order_to_compare(monkeypatch):
    optimizer = adding(monkeypatch, world_size=2)
    optimizer._fetcher = None
    assert optimizer._add_up(torch.tensor(2.0)) == 6.0
    assert optimizer._has_parted is False
    optimizer._check_gathered()


def test_a_step_that_has_failed_half_way_is_the_last():
    optimizer = made(_failure=None)
    optimizer._check_failure()
    optimizer._failure = "launch"
    with pytest.raises(OSError, match=r"the device failed \(`launch`\) .*hint: go on from a check"):
        optimizer._check_failure()


# ---- what a step hands to the engine ----


class Share:
    """Group 1 is stepped on the device."""

    def __init__(self, calls):
        self.calls = calls

    def __contains__(self, group):
        return group == 1

    def step_of(self, group, operand, weight, grad_scale):
        return [("on device", group, operand, weight, grad_scale)]

    def drop(self):
        self.calls.append("share dropped")


def operand_of(kind, *arguments):
    state = {"step": 6}
    tensor = arguments if kind == "host" and arguments[1] != 2 else None
    hyper = SimpleNamespace(core=lambda scale: scale)
    return Operand(tensor, 7, hyper, state, torch.zeros(1), f"{kind} {arguments[0]}")


def applied(*, is_gated=True, is_protected=True, gate=None, gathers=None, error=None):
    """An optimizer of four groups: in host memory, on the device, empty, and in host memory."""
    calls, prepared = [], []

    def prepare(*arguments, grad_scale):
        prepared.append((*arguments, grad_scale))
        calls.append("prepared")
        return ["submit", "after"]

    def open_gate(operands, uploads):
        calls.append(("opened", len(operands), uploads))
        return is_protected

    def commit(operands, submission):
        submit, taken, *rest = submission
        # An error before the submit is of a step that was not taken.
        assert optimizer._has_left is True
        assert submit == "submit"
        taken()
        calls.append(("committed", len(operands), rest))
        if error is not None:
            raise error

    optimizer = made(
        fp16_groups=[None] * 4,
        _unflatten_partitioned_parameters=lambda group: calls.append(group),
        fp32_partitioned_groups_flat=[f"master {group}" for group in range(4)],
        fp16_partitioned_groups_flat=[f"weight {group}" for group in range(4)],
        sub_group_to_group_id={0: 5, 1: 6, 2: 7, 3: 8},
        _plan=SimpleNamespace(gate="module" if is_gated else "step"),
        _share=Share(calls),
        _operands=SimpleNamespace(
            on_device=lambda *arguments: operand_of("device", *arguments),
            of=lambda *arguments: operand_of("host", *arguments),
            commit=commit,
        ),
        _partitions=SimpleNamespace(
            stepped_grads=lambda: [f"grad {group}" for group in range(4)],
            twins=[f"twin {group}" for group in range(4)],
            prepare=prepare,
            forget=noted(calls, "forgotten"),
            finish=noted(calls, "finished"),
        ),
        _persistent_uploads=lambda: "uploads",
        _open_gate=open_gate,
        _fetcher=None,
        _gate=gate
        and SimpleNamespace(
            is_open=gate == "open",
            wait_for_uncovered=noted(calls, "uncovered"),
            finish=noted(calls, "gate finished"),
        ),
        _gathers=gathers,
        _failure=None,
        _has_left=True,
        _is_after_step=False,
    )
    return optimizer, calls, prepared


def test_a_step_is_that_of_host_memory_and_of_the_device():
    optimizer, calls, prepared = applied()
    optimizer._apply(0.5)
    ((updates, weights, (masters, in_use), grad_scale),) = prepared
    assert [tuple(update) for update in updates] == [
        (0, (5, 0, "master 0", "grad 0", "twin 0"), 7, 0.5),
        (3, (8, 3, "master 3", "grad 3", "twin 3"), 7, 0.5),
    ]
    assert (weights, grad_scale) == (optimizer.fp16_partitioned_groups_flat, 0.5)
    assert masters is optimizer.fp32_partitioned_groups_flat
    assert [before for _, before in in_use] == ["host 5", "device 6", "host 7", "host 8"]
    (*first, (_, num_operands, rest), forgotten, dropped) = calls
    assert first == [0, 1, 2, 3, "prepared", ("opened", 4, "uploads")]
    assert num_operands == 4
    after, (kind, group, operand, weight, scale) = rest
    assert (after, kind, group, weight, scale) == ("after", "on device", 1, "weight 1", 0.5)
    assert operand.before == "device 6"
    assert [forgotten, dropped] == ["forgotten", "share dropped"]
    assert optimizer._is_after_step is True
    assert optimizer._has_left is False


def test_gathers_follow_the_submit():
    gathers = SimpleNamespace(submission=lambda uploads: [("gather", uploads)])
    optimizer, calls, _ = applied(gathers=gathers)
    optimizer._apply(1.0)
    (*_, (_, _, rest), _, _) = calls
    assert rest[:2] == [("gather", "uploads"), "after"]


@pytest.mark.parametrize("gate", [None, "open", "closed"])
@pytest.mark.parametrize("is_protected", [False, True])
def test_a_step_waits_for_what_is_not_seen(gate, is_protected):
    optimizer, calls, _ = applied(gate=gate, is_protected=is_protected)
    optimizer._apply(1.0)
    waits = [] if is_protected else ["finished"]
    if gate is not None:
        waits.append("uncovered" if is_protected and gate == "open" else "gate finished")
    assert calls[calls.index("share dropped") + 1 :] == waits


def test_without_a_gate_nothing_goes_up_behind_a_step():
    optimizer, calls, _ = applied(is_gated=False, is_protected=False)
    optimizer._apply(1.0)
    assert ("opened", 4, {}) in calls


def test_a_launch_that_fails_is_the_end():
    optimizer, calls, _ = applied(error=RuntimeError("launch"))
    with pytest.raises(OSError, match="`launch`"):
        optimizer._apply(1.0)
    assert optimizer._failure == "launch"
    assert "forgotten" not in calls
