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
    checked,
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


NOT_GATHERED = SimpleNamespace(is_gathered=False, decided=contextlib.nullcontext)


def round_of(calls):
    """A round of ranks that have nothing to say."""

    def check_gathered(forget_order):
        assert forget_order == "forget order"
        calls.append("check_gathered")

    return SimpleNamespace(
        has_left=False, check_left=noted(calls, "check_left"), check_gathered=check_gathered
    )


def stepping(monkeypatch, norm=3.0, *, world_size=1, swapped=None, gathers=False, **more):
    """An optimizer whose step notes its parts, and what it notes."""
    several(monkeypatch, stage_3.dist, world_size=world_size)
    calls = []

    def update_scale():
        calls.append(("scale", optimizer.overflow))
        return optimizer.overflow

    optimizer = made(
        _backward=checked(calls),
        _persistent=Gathers(calls) if gathers else NOT_GATHERED,
        _norm_round=NormRound(),
        dp_process_group="ranks",
        timers=Timers(),
        loss_scaler=SimpleNamespace(cur_scale=2.0),
        custom_loss_scaler=False,
        clip_grad=0.5,
        _round=round_of(calls),
        _fetcher=SimpleNamespace(forget_order="forget order"),
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
        **{
            f"_{name}": noted(calls, name)
            for name in (
                "check_failure",
                "pre_step",
                "partition_all_parameters",
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
    assert optimizer._round.has_left is True


def test_deepspeeds_hooks_have_no_order_to_compare(monkeypatch):
    optimizer, calls = stepping(monkeypatch, _fetcher=None)
    optimizer.step()
    assert "check_left" in calls
    assert "check_gathered" not in calls


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
    assert optimizer._round.has_left is False


@pytest.mark.parametrize("name", ["check_left", "check_gathered", "_apply"])
@pytest.mark.parametrize("error", [OSError, KeyboardInterrupt])
def test_a_step_that_raises_leaves_no_gradients(monkeypatch, name, error):
    optimizer, calls = stepping(monkeypatch)
    owner = optimizer if name == "_apply" else optimizer._round
    vars(owner)[name] = mock.Mock(side_effect=error)
    with pytest.raises(error):
        optimizer.step()
    assert calls[-2:] == ["settled", "drop_gradients"]


def test_why_gradients_could_not_be_dropped_is_said_next(monkeypatch):
    error = mock.Mock(side_effect=MemoryError("no memory"))
    optimizer, calls = stepping(monkeypatch, _apply=error, _backward=Backward())
    assert_failed_drop_is_said(optimizer, calls)


# ---- what ranks tell each other ----


@pytest.mark.parametrize("has_fetcher", [False, True])
def test_what_is_stepped_on_the_device_counts(has_fetcher):
    fetcher = SimpleNamespace(gather_order=SimpleNamespace(end=lambda: [2.0, 4.0]))
    optimizer = made(
        _share=SimpleNamespace(squares=lambda: torch.tensor(1.0)),
        _fetcher=fetcher if has_fetcher else None,
        _round=SimpleNamespace(add_up=lambda squares, gathered: (float(squares), gathered)),
    )
    assert optimizer._add_up(torch.tensor(2.0)) == (3.0, [2.0, 4.0] if has_fetcher else [])


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


class Persistent:
    """Persistent parameters that come behind a step."""

    def __init__(self, calls, gathered):
        self.calls, self.gathered = calls, gathered

    def uploads(self, weights, masters):
        assert (weights[0], masters[0]) == ("weight 0", "master 0")
        return "uploads"

    def open(self, uploads, *, is_protected):
        self.calls.append(("opened", uploads, is_protected))

    def submission(self, uploads):
        return [(each, uploads) for each in self.gathered]

    def end_step(self, *, is_protected):
        self.calls.append(("step ended", is_protected))


def applied(*, is_gated=True, is_protected=True, gathered=(), error=None):
    """An optimizer of four groups: in host memory, on the device, empty, and in host memory."""
    calls, prepared = [], []

    def prepare(*arguments, grad_scale):
        prepared.append((*arguments, grad_scale))
        calls.append("prepared")
        return ["submit", "after"]

    def protect(operands, uploads):
        calls.append(("protected", len(operands), uploads))
        return is_protected

    def commit(operands, submission):
        submit, taken, *rest = submission
        # An error before the submit is of a step that was not taken.
        assert optimizer._round.has_left is True
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
        _persistent=Persistent(calls, gathered),
        _protect=protect,
        _fetcher=None,
        _failure=None,
        _round=SimpleNamespace(has_left=True),
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
    (*first, (_, num_operands, rest), forgotten, dropped, _) = calls
    opened = [("protected", 4, "uploads"), ("opened", "uploads", True)]
    assert first == [0, 1, 2, 3, "prepared", *opened]
    assert num_operands == 4
    after, (kind, group, operand, weight, scale) = rest
    assert (after, kind, group, weight, scale) == ("after", "on device", 1, "weight 1", 0.5)
    assert operand.before == "device 6"
    assert [forgotten, dropped] == ["forgotten", "share dropped"]
    assert optimizer._is_after_step is True
    assert optimizer._round.has_left is False


def test_gathers_follow_the_submit():
    optimizer, calls, _ = applied(gathered=["gather"])
    optimizer._apply(1.0)
    (*_, (_, _, rest), _, _, _) = calls
    assert rest[:2] == [("gather", "uploads"), "after"]


@pytest.mark.parametrize("is_gated", [False, True])
@pytest.mark.parametrize("is_protected", [False, True])
def test_a_step_waits_for_what_is_not_seen(is_gated, is_protected):
    optimizer, calls, _ = applied(is_gated=is_gated, is_protected=is_protected)
    optimizer._apply(1.0)
    is_seen = is_gated and is_protected
    assert ("opened", "uploads", is_seen) in calls
    assert (("protected", 4, "uploads") in calls) is is_gated
    waits = [] if is_seen else ["finished"]
    assert calls[calls.index("share dropped") + 1 :] == [*waits, ("step ended", is_seen)]


def test_a_launch_that_fails_is_the_end():
    optimizer, calls, _ = applied(error=RuntimeError("launch"))
    with pytest.raises(OSError, match="`launch`"):
        optimizer._apply(1.0)
    assert optimizer._failure == "launch"
    assert "forgotten" not in calls


def test_the_norm_is_behind_reductions_on_whatever_stream_a_program_steps(monkeypatch):
    optimizer, calls = stepping(monkeypatch, reduce_and_partition_stream="reductions")
    optimizer._partitions.device = torch.device("cuda")
    stream = SimpleNamespace(wait_stream=calls.append)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: stream)
    optimizer.step()
    assert calls[: calls.index("norm") + 1] == [*FIRST, "reductions", "norm"]
