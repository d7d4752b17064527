"""Methods of ZeRO-1's and -2's optimizer, each by itself: its step, and what waits for it.

As `zero_1_2_stand_ins.py`.
"""

import math
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from deepspeed.runtime.zero.offload_config import OffloadStateTypeEnum
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer
from stand_in_optimizers import (
    Gathers,
    Timers,
    assert_failed_drop_is_said,
    checked,
    noted,
    optimizer_of,
)
from stepwell.deepspeed.zero import stage_1_2
from stepwell.deepspeed.zero.backward import Backward
from stepwell.deepspeed.zero.exposure import Exposure
from stepwell.deepspeed.zero.fragment import Fragment
from stepwell.deepspeed.zero.norm_round import NormRound
from stepwell.deepspeed.zero.operands import Operand
from stepwell.deepspeed.zero.stage_1_2 import OffloadZeroOptimizer

BF16, FP16 = torch.bfloat16, torch.float16


def made(**fields):
    return optimizer_of(OffloadZeroOptimizer, fields)


# ---- steps ----


def stepping(norm=3.0, *, gathers=False, **more):
    """An optimizer whose step notes its parts, and what it notes."""
    calls = []
    optimizer = made(
        _backward=checked(calls),
        _gathers=Gathers(calls) if gathers else None,
        _told_steps=None,
        _norm_round=NormRound(),
        _is_alone=True,
        timers=Timers(),
        dtype=BF16,
        check_grad_overflow=True,
        loss_scaler=SimpleNamespace(cur_scale=2.0),
        custom_loss_scaler=False,
        clip_grad=0.5,
        micro_step_id=5,
        _operands=SimpleNamespace(skips_nonfinite=lambda: True),
        _partitions=SimpleNamespace(
            gradients=SimpleNamespace(norm=lambda add_up: norm),
            settle=noted(calls, "settled"),
            device=torch.device("cpu"),
        ),
        _update_scale=lambda overflow: calls.append(("scale", overflow)),
        _apply=lambda grad_scale: calls.append(("applied", grad_scale)),
        **{
            f"_{name}": noted(calls, name)
            for name in ("check_used", "skip", "release_sums", "drop_gradients", "gather_weights")
        },
    )
    optimizer.synchronize = noted(calls, "synchronized")
    vars(optimizer).update(more)
    return optimizer, calls


def test_no_step_follows_one_that_another_rank_has_failed():
    optimizer, calls = stepping()
    optimizer._told_steps = SimpleNamespace(check=mock.Mock(side_effect=OSError("rank 1")))
    with pytest.raises(OSError, match="rank 1"):
        optimizer.step()
    assert calls == ["check"]


def test_ranks_that_gather_in_the_step_tell_of_it_before():
    optimizer, calls = stepping()
    optimizer._told_steps = Gathers(calls)
    optimizer._told_steps.check = noted(calls, "told_check")
    optimizer.step()
    assert calls == [
        "check",
        "told_check",
        "check_used",
        ("scale", False),
        "decided",
        APPLIED,
        "told",
        "release_sums",
        "gather_weights",
    ]


@pytest.mark.parametrize("gathers", [False, True])
@pytest.mark.parametrize("error", [ValueError, OSError, KeyboardInterrupt])
@pytest.mark.parametrize("place", ["used", "norm"])
def test_what_keeps_a_rank_from_the_norm_is_told_in_it(place, error, gathers):
    """Also what has failed a copy; not Ctrl-C."""
    optimizer, calls = stepping(gathers=gathers)
    added = []
    optimizer._is_alone = False
    optimizer._add_up = lambda squares: added.append((float(squares), optimizer._norm_round.meet()))
    fail = mock.Mock(side_effect=error("mine"))
    if place == "used":
        optimizer._check_used = fail
    else:
        optimizer._partitions.gradients.norm = fail
    with pytest.raises(error, match="mine"):
        optimizer.step()
    assert added == ([] if error is KeyboardInterrupt else [(0.0, 1.0)])
    assert "applied" not in [call[0] for call in calls if isinstance(call, tuple)]
    assert optimizer._norm_round.meet() == 0.0


def test_an_error_behind_the_norm_is_not_told_in_it():
    optimizer, _ = stepping()
    added = []
    optimizer._is_alone = False

    def norm(add_up):
        add_up(torch.ones(()))
        raise ValueError("mine")

    optimizer._add_up = lambda _: added.append(optimizer._norm_round.meet())
    optimizer._partitions.gradients.norm = norm
    with pytest.raises(ValueError, match="mine"):
        optimizer.step()
    assert added == [0.0]


@pytest.mark.parametrize("first", [1.0, math.inf, math.nan])
@pytest.mark.parametrize("num_failed", [0.0, 1.0])
def test_an_error_behind_a_sum_that_is_not_finite_is_told_in_the_next(
    monkeypatch, first, num_failed
):
    optimizer, _ = stepping()
    told = []
    optimizer._is_alone = False
    optimizer.local_overflow = False
    optimizer.dp_process_group = "ranks"

    def all_reduce(sums, op, group):
        told.append((sums.dtype, sums.tolist()))
        # Of another rank.
        sums.add_(torch.tensor([first, num_failed if len(told) == 1 else 0.0]))

    def norm(add_up):
        add_up(torch.tensor(2.0))
        raise OSError("a copy")

    monkeypatch.setattr(stage_1_2.dist, "all_reduce", all_reduce)
    optimizer._partitions.gradients.norm = norm
    # Where the other cannot step it does not come again.
    with pytest.raises(OSError, match="cannot take this step" if num_failed else "^a copy$"):
        optimizer.step()
    again = [] if num_failed or math.isfinite(first) else [(torch.float64, [0.0, 1.0])]
    assert told == [(torch.float32, [2.0, 0.0]), *again]
    assert optimizer._norm_round.meet() == 0.0


# Of norm 3 at a scale of 2: 1.5, clipped to a half.
APPLIED = ("applied", pytest.approx(0.5 / 1.5 / 2, rel=1e-5))


def test_a_step_is_applied_and_gathered():
    optimizer, calls = stepping()
    optimizer.step()
    assert calls == [
        "check",
        "check_used",
        ("scale", False),
        APPLIED,
        "release_sums",
        "gather_weights",
    ]
    assert (optimizer.overflow, float(optimizer._global_grad_norm)) == (False, 1.5)
    assert optimizer.micro_step_id == stage_1_2.INITIAL_MICRO_STEP_ID
    assert optimizer._offload_accumulated_param_ids == set()
    assert optimizer.timers.ended == ["optimizer_gradients", "optimizer_allgather"]
    assert optimizer.timers.logged == [stage_1_2.OPTIMIZER_TIMERS]


def test_ranks_that_gather_behind_a_step_wait_for_the_last_one_first():
    optimizer, calls = stepping(gathers=True)
    optimizer.step()
    assert calls == [
        "check",
        "synchronized",
        "check_used",
        ("scale", False),
        "decided",
        APPLIED,
        "told",
        "release_sums",
    ]


def test_a_step_that_is_skipped_decides_nothing():
    optimizer, calls = stepping(math.inf, gathers=True)
    optimizer.step()
    assert calls == ["check", "synchronized", "check_used", ("scale", True), "skip"]
    assert optimizer._global_grad_norm == math.inf
    assert not optimizer.timers.running


@pytest.mark.parametrize("norm", [math.nan, math.inf, 1.0])
@pytest.mark.parametrize("skips", [False, True])
@pytest.mark.parametrize("dtype", [BF16, FP16])
@pytest.mark.parametrize("is_checked", [False, True])
def test_which_steps_are_skipped(norm, skips, dtype, is_checked):
    optimizer, calls = stepping(
        norm,
        dtype=dtype,
        check_grad_overflow=is_checked,
        _operands=SimpleNamespace(skips_nonfinite=lambda: skips),
    )
    optimizer.step()
    is_skipped = norm != 1.0 and (skips or is_checked or dtype == FP16)
    assert optimizer.overflow is is_skipped
    assert ("skip" in calls) is is_skipped


@pytest.mark.parametrize("name", ["_check_used", "_apply", "_release_sums"])
@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_a_step_that_raises_leaves_no_gradients(name, error):
    optimizer, calls = stepping(**{name: mock.Mock(side_effect=error)})
    with pytest.raises(error):
        optimizer.step()
    assert calls[-2:] == ["settled", "drop_gradients"]


def test_why_gradients_could_not_be_dropped_is_said_next():
    error = mock.Mock(side_effect=MemoryError("no memory"))
    optimizer, calls = stepping(_apply=error, _backward=Backward())
    assert_failed_drop_is_said(optimizer, calls)


@pytest.mark.parametrize("is_alone", [False, True])
def test_weights_of_several_ranks_are_gathered(monkeypatch, is_alone):
    gathered = []
    monkeypatch.setattr(stage_1_2, "all_gather_dp_groups", lambda **named: gathered.append(named))
    fields = {
        "bit16_groups_flat": 1,
        "parallel_partitioned_bit16_groups": 2,
        "real_dp_process_group": 3,
        "nccl_start_alignment_factor": 4,
        "allgather_bucket_size": 5,
    }
    made(_is_alone=is_alone, **fields)._gather_weights()
    assert [list(each.values()) for each in gathered] == ([] if is_alone else [[1, 2, 3, 4, 5]])


# ---- what a step hands to the engine ----


def operand_of(group, grad, twin, master):
    return Operand(
        None if group == 1 else f"tensor {group}",
        7,
        SimpleNamespace(core=lambda scale: (grad, twin, scale)),
        {"step": 6, "exp_avg": torch.zeros(1)},
        master,
        f"before {group}",
    )


def applied(*, is_gated=True, gathers=None, swapped=None):
    """Calls in the order of a step of three groups, the second of which is empty."""
    calls = []
    masters = [torch.zeros(numel) for numel in (3, 0, 2)]
    prepared = []

    def prepare(updates, weights, in_use, *, grad_scale):
        prepared.append((updates, weights, in_use, grad_scale))
        calls.append("prepared")
        return ["submit", "after"]

    def protect(operands):
        calls.append(("protected", list(operands)))
        return True

    optimizer = made(
        timers=Timers(),
        _masters=masters,
        _operands=SimpleNamespace(
            of=lambda index, ordinal, master, grad, twin: (
                operand_of(index, grad, twin, master) if index == ordinal else None
            ),
            commit=lambda operands, submission: calls.append(("committed", submission)),
            swapped=swapped,
        ),
        _partitions=SimpleNamespace(
            stepped_grads=lambda: ["grad 0", "grad 1", "grad 2"],
            twins=["twin 0", "twin 1", "twin 2"],
            prepare=prepare,
            forget=noted(calls, "forgotten"),
        ),
        _weights=lambda: "weights",
        _open_gate=noted(calls, "opened", is_gated),
        _protect=protect,
        _gathers=gathers,
        _told_steps=None,
        parallel_partitioned_bit16_groups="parts",
        _gate=SimpleNamespace(wait_for_uncovered=noted(calls, "uncovered")),
        _lazy_init_hp_params_optimizer_state=noted(calls, "states"),
    )
    optimizer.synchronize = noted(calls, "synchronized")
    return optimizer, calls, prepared


def test_small_groups_are_stepped_first():
    optimizer, calls, prepared = applied()
    optimizer._apply(0.5)
    ((updates, weights, (masters, in_use), grad_scale),) = prepared
    assert [tuple(update) for update in updates] == [
        (group, f"tensor {group}", 7, (f"grad {group}", f"twin {group}", 0.5)) for group in (2, 0)
    ]
    assert (weights, grad_scale) == ("weights", 0.5)
    assert masters is optimizer._masters
    assert [before for _, before in in_use] == ["before 1", "before 2", "before 0"]
    assert calls == [
        "prepared",
        "opened",
        ("protected", [1, 2, 0]),
        ("committed", ["submit", "after"]),
        "forgotten",
        "uncovered",
        "states",
    ]
    assert optimizer.timers.ended == ["optimizer_step"]


def test_a_step_that_is_not_gated_is_waited_for():
    optimizer, calls, _ = applied(is_gated=False)
    optimizer._apply(1.0)
    assert calls[-3:] == ["forgotten", "synchronized", "states"]
    assert not any(call[0] == "protected" for call in calls)
    optimizer, calls, _ = applied()
    optimizer._gate = None
    optimizer._apply(1.0)
    assert calls[-2:] == ["synchronized", "states"]


def test_a_step_is_marked_as_taken_directly_behind_the_submit():
    optimizer, calls, _ = applied()
    optimizer._told_steps = SimpleNamespace(is_taken=False)
    optimizer._apply(1.0)
    (submission,) = [call[1] for call in calls if call[0] == "committed"]
    submit, mark, after = submission
    assert (submit, after) == ("submit", "after")
    mark()
    assert optimizer._told_steps.is_taken


def test_gathers_follow_the_submit():
    gathers = SimpleNamespace(submission=lambda groups, parts: [(groups, parts)])
    optimizer, calls, _ = applied(gathers=gathers, swapped="volume")
    optimizer._apply(1.0)
    assert ("committed", ["submit", ([1, 2, 0], "parts"), "after"]) in calls
    # Of a volume fragments get moments by their home.
    assert "states" not in calls


# ---- waiting ----


@pytest.mark.parametrize("is_gathered", [False, True])
def test_a_gate_waits_for_what_lands(monkeypatch, is_gathered):
    class Gate:
        is_open = True

        def __init__(self, *arguments):
            self.arguments, self.opened = arguments, []

        def attach(self, *attached):
            self.attached = attached

        def open(self, *arguments):
            self.opened.append(arguments)

    monkeypatch.setattr(stage_1_2, "Gate", Gate)
    optimizer = made(
        _plan=SimpleNamespace(gate="module"),
        _gate=None,
        _gathers="gathers" if is_gathered else None,
        bit16_groups=[["a"], ["b", "c"]],
        _fragment_uploads=lambda params: ("uploads", params),
        _exposed=lambda: ["b"],
    )
    params = ["a", "b", "c"]
    optimizer.watch("module")
    gate = optimizer._gate
    assert gate.arguments == ("module", params)
    assert gate.attached == (params, "gathers" if is_gathered else ("uploads", params))
    assert optimizer._open_gate() is True
    assert gate.opened == [(params, ["b"])]
    # It closes where a compiled module is found.
    gate.is_open = False
    assert optimizer._open_gate() is False
    assert len(gate.opened) == 1


def test_a_gate_waits_for_the_fragments_of_parameters():
    waited = []
    params = [torch.nn.Parameter(torch.zeros(1)) for _ in range(2)]
    optimizer = made(
        param_id={id(param): number for number, param in enumerate(params)},
        grad_position={0: (0, 0, 4, 1), 1: (1, 0, 5, 1)},
        _partitions=SimpleNamespace(
            wait=lambda fragments: waited.extend(fragments), timing=lambda: "timing"
        ),
    )
    optimizer._fragment_uploads(params).wait(params[1:])
    assert waited == [Fragment(1, 5, 1)]
    assert optimizer.timing == "timing"


def test_without_a_gate_a_step_is_waited_for():
    optimizer = made(_plan=SimpleNamespace(gate="step"), _gate=None, bit16_groups=[])
    optimizer.watch("module")
    assert optimizer._open_gate() is False
    assert optimizer._gate is None


def test_masters_and_their_state_are_protected():
    found = []
    fragments = [torch.zeros(1), torch.zeros(1)]
    params = [torch.nn.Parameter(torch.zeros(1)) for _ in range(3)]
    params[0]._hp_mapping = SimpleNamespace(
        hp_fragment=fragments[0], optim_fragment={"exp_avg": fragments[1]}
    )
    params[1]._hp_mapping = SimpleNamespace(hp_fragment=fragments[0], optim_fragment=None)
    optimizer = made(
        bit16_groups=[params[:2], params[2:]],
        _operands=SimpleNamespace(written=lambda group, operand: operand.state["written"]),
        _partitions=SimpleNamespace(protect=lambda *arguments: found.append(arguments) or "told"),
    )
    written = [[torch.zeros(3), torch.zeros(1), torch.zeros(0)], [torch.zeros(2)]]
    operands = {
        group: SimpleNamespace(state={"written": tensors}, master=tensors[0])
        for group, tensors in enumerate(written)
    }
    assert optimizer._protect(operands) == "told"
    ((parts, holders),) = found
    assert [(id(tensor), fragments) for tensor, fragments in parts.items()] == [
        (id(written[0][0]), [Fragment(0, 0, 3)]),
        (id(written[0][1]), [Fragment(0, 0, 3)]),
        (id(written[1][0]), [Fragment(1, 0, 2)]),
    ]
    assert list(map(id, holders)) == [id(fragments[each]) for each in (0, 1, 0)]


def test_a_view_of_some_weight_exposes_its_group():
    flats = [torch.zeros(4), torch.zeros(4)]
    params = [[torch.nn.Parameter(each) for each in flat.split(2)] for flat in flats]
    optimizer = made(bit16_groups_flat=flats, bit16_groups=params, _exposure=Exposure(flats))
    assert optimizer._exposed() == []
    view = flats[1][:1]
    assert list(map(id, optimizer._exposed())) == list(map(id, params[1]))
    del view
    assert optimizer._exposed() == []


def test_a_wait_is_the_gates_where_there_is_one():
    calls = []
    optimizer = made(_gate=None)
    # DeepSpeed's constructor reads its data.
    optimizer.synchronize()
    optimizer._partitions = SimpleNamespace(finish=noted(calls, "partitions"))
    optimizer.synchronize()
    optimizer._gate = SimpleNamespace(finish=noted(calls, "gate"))
    optimizer.synchronize()
    assert calls == ["partitions", "gate"]


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("state_dict", ["synchronized", "theirs"]),
        ("load_state_dict", ["synchronized", "streams", "theirs"]),
        ("offload_states", ["synchronized", "streams", "theirs"]),
        ("reload_states", ["theirs"]),
    ],
)
def test_what_reads_or_writes_all_state_waits(monkeypatch, name, expected):
    calls = []
    monkeypatch.setattr(DeepSpeedZeroOptimizer, name, noted(calls, "theirs", {"step": 1}))
    optimizer = made(
        _partitions=SimpleNamespace(synchronize=noted(calls, "streams")),
        bit16_groups_flat=[torch.zeros(1)],
        _exposure=None,
    )
    optimizer.synchronize = noted(calls, "synchronized")
    assert getattr(optimizer, name)() == ({"step": 1} if name == "state_dict" else None)
    assert calls == expected
    assert (optimizer._exposure is not None) is (name == "reload_states")


def test_what_is_in_host_memory_stays_there(monkeypatch):
    wanted = []
    monkeypatch.setattr(
        DeepSpeedZeroOptimizer, "offload_states", lambda _, include: wanted.append(include)
    )
    optimizer = made(_partitions=mock.Mock())
    optimizer.synchronize = lambda: None
    weights, grads = OffloadStateTypeEnum.lp_params, OffloadStateTypeEnum.lp_grads
    optimizer.offload_states()
    optimizer.offload_states([OffloadStateTypeEnum.optim_states, grads])
    assert wanted == [[weights, grads], [grads]]


@pytest.mark.parametrize("swapped", [None, "volume"])
def test_an_end_waits_for_copies_first(monkeypatch, swapped):
    calls = []
    monkeypatch.setattr(DeepSpeedZeroOptimizer, "destroy", noted(calls, "theirs"))
    optimizer = made(_gate="gate", _gathers="gathers")
    # What has not been made has nothing to wait for.
    optimizer.destroy()
    assert calls == ["theirs"]
    optimizer = made(
        _gate="gate",
        _gathers="gathers",
        _operands=SimpleNamespace(swapped=swapped),
        _partitions=SimpleNamespace(
            drop=noted(calls, "dropped"),
            synchronize=noted(calls, "streams"),
            end=noted(calls, "ended"),
            claim=SimpleNamespace(end=noted(calls, "claim")),
        ),
    )
    optimizer.synchronize = noted(calls, "synchronized")
    optimizer.destroy()
    last = ["streams", "claim"] if swapped is None else ["ended"]
    assert calls[1:] == ["dropped", "synchronized", *last, "theirs"]
    assert optimizer._gate is optimizer._gathers is None


@pytest.mark.parametrize("overlap_comm", [False, True])
def test_the_norm_is_behind_reductions_on_whatever_stream_a_program_steps(
    monkeypatch, overlap_comm
):
    optimizer, calls = stepping(overlap_comm=overlap_comm, reduction_stream="reductions")
    optimizer._partitions.device = torch.device("cuda")
    optimizer._partitions.gradients.norm = lambda add_up: calls.append("norm") or 3.0
    stream = SimpleNamespace(wait_stream=calls.append)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: stream)
    optimizer._norm()
    assert calls[1:] == ["reductions"] * overlap_comm + ["norm"]
