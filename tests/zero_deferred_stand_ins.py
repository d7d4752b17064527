"""Methods of the ZeRO optimizer that defers updates, each by itself. As `zero_1_2_stand_ins.py`."""

import contextlib
import gc
from types import SimpleNamespace

import pytest
import torch
from stand_in_optimizers import Timers, noted, optimizer_of
from stepwell.deepspeed.zero import deferred
from stepwell.deepspeed.zero.deferred import DeferredZeroOptimizer
from stepwell.deepspeed.zero.deferred_gradients import Source
from stepwell.deepspeed.zero.fragment import Fragment
from stepwell.deepspeed.zero.stage_1_2 import OffloadZeroOptimizer
from stepwell.offload.deferred import Deferred


def made(**fields):
    return optimizer_of(DeferredZeroOptimizer, fields)


def test_what_is_deferred_is_known_before_deepspeed_makes_the_rest(monkeypatch):
    given = []

    def begin(self, *arguments, **named):
        # Its partitions are made within.
        assert self._deferred.interval == 4
        given.append((arguments, named))

    monkeypatch.setattr(OffloadZeroOptimizer, "__init__", begin)
    plan = SimpleNamespace(zenflow=SimpleNamespace(deferred=Deferred(interval=4)))
    optimizer = DeferredZeroOptimizer("base", "names", plan=plan, clip_grad=1.0)
    assert given == [(("base", "names"), {"plan": plan, "clip_grad": 1.0})]
    assert optimizer._deferred is plan.zenflow.deferred
    assert optimizer._is_skipped is False


def test_sources_are_of_what_this_rank_steps(monkeypatch):
    monkeypatch.setattr(deferred, "DeferredPartitions", lambda *args, **named: (args, named))
    shapes = [(2, 3), (5,), (0, 3), (4, 2), (2, 2, 2)]
    matrix, vector, empty, elsewhere, cube = params = [
        torch.nn.Parameter(torch.zeros(shape)) for shape in shapes
    ]
    options = SimpleNamespace(host_bytes_max=1000)
    optimizer = made(
        bit16_groups=[[matrix, vector, empty], [elsewhere, cube]],
        param_id={id(param): number for number, param in enumerate(params)},
        # The first has its last four elements here.
        grad_position={0: (0, 2, 0, 4), 1: (0, 0, 4, 5), 2: (0, 0, 9, 0), 4: (1, 1, 3, 7)},
        _plan=SimpleNamespace(options=options, threads=3),
        _deferred="deferred",
        _is_alone=False,
    )
    partitions = [SimpleNamespace(weight=torch.zeros(1)), SimpleNamespace(weight=None)]
    (found, sources, together, held), named = optimizer._open_partitions(partitions)
    assert (found, held) == (partitions, "deferred")
    assert sources == {
        Fragment(0, 0, 4): Source(2, 3),
        Fragment(0, 4, 5): Source(0, 0),
        Fragment(1, 3, 7): Source(1, 4),
    }
    assert list(map(id, together)) == list(map(id, params))
    assert named == {
        "device": torch.device("cpu"),
        "is_alone": False,
        "threads": 3,
        "host_bytes_max": 1000,
    }


def test_metrics_are_of_the_last_step(monkeypatch):
    metrics = SimpleNamespace(of=lambda interval, timing: (interval, timing))
    monkeypatch.setattr(deferred, "DeferralMetrics", metrics)
    optimizer = made(
        _deferred=SimpleNamespace(interval=4), _partitions=SimpleNamespace(timing=lambda: "timing")
    )
    assert optimizer.deferral == (4, "timing")


# ---- steps ----


def stepping(monkeypatch, *, is_skipped=False, error=None, finish_error=None):
    """What a step notes."""
    calls = []

    def step(self, closure):
        assert closure == "closure"
        calls.append("theirs")
        if error is not None:
            raise error
        self._is_skipped = is_skipped

    @contextlib.contextmanager
    def in_step():
        calls.append("begun")
        try:
            yield
        finally:
            calls.append("over")

    def finish():
        calls.append("finished")
        if finish_error is not None:
            raise finish_error

    monkeypatch.setattr(OffloadZeroOptimizer, "step", step)
    optimizer = made(
        _partitions=SimpleNamespace(stepping=in_step, finish=finish),
        _steps=SimpleNamespace(excuse=noted(calls, "excused")),
        _is_skipped=False,
    )
    optimizer.drain = noted(calls, "drained")
    return optimizer, calls


@pytest.mark.parametrize("is_skipped", [False, True])
def test_a_skipped_step_applies_what_is_pending(monkeypatch, is_skipped):
    optimizer, calls = stepping(monkeypatch, is_skipped=is_skipped)
    optimizer.step("closure")
    assert calls == ["begun", "theirs", "over", *(["excused", "drained"] if is_skipped else [])]
    assert optimizer._is_skipped is False


@pytest.mark.parametrize("finish_error", [None, OSError, ValueError])
@pytest.mark.parametrize("error", [MemoryError, KeyboardInterrupt])
def test_a_step_that_raises_applies_what_this_rank_has_pending(monkeypatch, error, finish_error):
    optimizer, calls = stepping(monkeypatch, error=error, finish_error=finish_error)
    with pytest.raises(error):
        optimizer.step("closure")
    assert calls == ["begun", "theirs", "over", "excused", "finished"]


def test_a_skip_is_remembered(monkeypatch):
    calls = []
    monkeypatch.setattr(OffloadZeroOptimizer, "_skip", noted(calls, "theirs"))
    optimizer = made(_is_skipped=False)
    optimizer._skip()
    assert (calls, optimizer._is_skipped) == (["theirs"], True)


def test_gradients_are_scored_once_all_are_there(monkeypatch):
    calls = []
    monkeypatch.setattr(OffloadZeroOptimizer, "_check_used", noted(calls, "theirs"))
    optimizer = made(
        _partitions=SimpleNamespace(score=lambda **named: calls.append(named)),
        _is_deferred=lambda: "deferred",
        _next_step=lambda: 5,
        _is_seen=lambda: "seen",
        _steps=SimpleNamespace(
            is_followed_by_deferred=lambda step, *, is_seen: (step, is_seen),
        ),
    )
    optimizer._check_used()
    assert calls == ["theirs", {"is_deferred": "deferred", "is_selected": (5, "seen")}]


def test_the_next_step_is_the_first_that_no_partition_has_seen():
    masters = [torch.zeros(1) for _ in range(4)]
    base = SimpleNamespace(state={})
    optimizer = made(optimizer=base, _masters=masters)
    assert optimizer._next_step() == 1
    base.state = {masters[0]: {}, masters[1]: {"step": torch.tensor(4.0)}, masters[2]: {"step": 2}}
    assert optimizer._next_step() == 5
    base.state = {masters[3]: {"exp_avg": None}}
    assert optimizer._next_step() == 1
    optimizer._masters = []
    assert optimizer._next_step() == 1


def gate_of(*, is_open=True, calls=(), uncovered=()):
    return SimpleNamespace(
        is_open=is_open,
        open=lambda *arguments: calls.append(arguments),
        uncovered=list(uncovered),
    )


@pytest.mark.parametrize(
    ("is_alone", "gate", "is_seen"),
    [
        (False, None, True),
        (True, None, False),
        (True, gate_of(), True),
        (True, gate_of(is_open=False), False),
    ],
)
def test_looks_at_weights_are_seen_by_an_open_gate(is_alone, gate, is_seen):
    assert made(_is_alone=is_alone, _gate=gate)._is_seen() is is_seen


def test_a_step_is_deferred_as_its_number_and_what_is_pending_say():
    optimizer = made(
        _next_step=lambda: 5,
        _is_seen=lambda: "seen",
        _partitions=SimpleNamespace(is_settled="settled"),
        _steps=SimpleNamespace(
            is_deferred=lambda step, *, is_seen, is_settled: (step, is_seen, is_settled)
        ),
    )
    assert optimizer._is_deferred() == (5, "seen", "settled")


def applied(*, is_deferred=True, gate="open"):
    """What a step of three groups notes, the second of which is empty."""
    calls = []
    params = [torch.nn.Parameter(torch.zeros(1)) for _ in range(2)]
    steps = SimpleNamespace(note=lambda *arguments, **named: calls.append((arguments, named)))

    def prepare(operands, *, grad_scale, at_once):
        calls.append((operands, grad_scale, at_once))
        return ["submit"]

    optimizer = made(
        timers=Timers(),
        _masters=[torch.zeros(numel) for numel in (3, 0, 2)],
        _operands=SimpleNamespace(
            of=lambda index, ordinal, master, grad, twin: (
                (index, ordinal, master.numel(), grad, twin)
            ),
            commit=lambda operands, submission: calls.append((operands, submission)),
        ),
        _partitions=SimpleNamespace(
            twins="abc",
            is_settled="settled",
            finish_job=noted(calls, "job finished"),
            prepare=prepare,
            forget=noted(calls, "forgotten"),
            wait_for_landing=noted(calls, "landed"),
        ),
        _steps=steps,
        _told_steps=None,
        _is_deferred=lambda: is_deferred,
        _next_step=lambda: 5,
        _is_seen=lambda: "seen",
        _guard_weights=noted(calls, "guarded", params),
        _fragment=lambda param: params.index(param) if param is params[0] else 1,
        _gate=None
        if gate is None
        else SimpleNamespace(is_open=gate == "open", wait_for_uncovered=noted(calls, "uncovered")),
        _lazy_init_hp_params_optimizer_state=noted(calls, "states"),
    )
    optimizer._apply(0.5)
    assert optimizer.timers.ended == ["optimizer_step"]
    return calls


@pytest.mark.parametrize("is_deferred", [False, True])
def test_what_is_not_waited_for_is_stepped_at_once(is_deferred):
    operands = {2: (2, 2, 2, None, "c"), 0: (0, 0, 3, None, "a")}
    calls = applied(is_deferred=is_deferred)
    assert calls == [
        ((5,), {"is_seen": "seen", "is_settled": "settled"}),
        "job finished",
        "guarded",
        (operands, 0.5, {0, 1} if is_deferred else None),
        (list(operands.values()), ["submit"]),
        "forgotten",
        "uncovered",
        "states",
    ]
    assert list(calls[3][0]) == [2, 0]


@pytest.mark.parametrize("gate", [None, "closed"])
def test_without_an_open_gate_weights_land_within_the_step(gate):
    assert applied(gate=gate)[-3:] == ["forgotten", "landed", "states"]


def test_accesses_are_guarded_on_one_rank(monkeypatch):
    opened = []
    params = [torch.nn.Parameter(torch.zeros(1)) for _ in range(3)]
    attached = []
    monkeypatch.setattr(
        deferred,
        "Gate",
        lambda *arguments, **named: SimpleNamespace(
            **vars(gate_of(calls=opened, uncovered=params[:1])),
            arguments=arguments,
            named=named,
            attach=lambda *arguments: attached.append(arguments),
        ),
    )
    partitions = SimpleNamespace(
        finish=noted(opened, "settled"), has_pending=lambda: "pending", finish_job=None
    )
    optimizer = made(
        _is_alone=True,
        bit16_groups=[params[:2], params[2:]],
        _gate=None,
        _partitions=partitions,
        _fragment=lambda param: "fragment",
        _exposed=lambda: "exposed",
    )
    assert optimizer._guard_weights() == []
    optimizer.watch("module")

    def guarded():
        return list(map(id, optimizer._guard_weights()))

    assert guarded() == [id(params[0])]
    gate = optimizer._gate
    assert gate.arguments[0] == "module"
    assert gate.named == {"wait_bytes_max": deferred.LANDING_BYTES_MAX}
    ((known, uploads),) = attached
    assert list(map(id, known)) == list(map(id, params))
    assert (uploads._partitions, len(uploads._fragments)) == (partitions, 3)
    assert [exposed for _, exposed in opened] == ["exposed"]
    uploads.settle()
    assert opened[1:] == ["settled"]
    assert uploads.has_pending() == "pending"
    # A step waits for all where looks at weights are not seen.
    gate.is_open = False
    assert guarded() == list(map(id, params))


# ---- waiting ----


@pytest.mark.parametrize("is_alone", [False, True])
def test_a_checkpoint_has_all_updates(is_alone):
    calls = []
    optimizer = made(
        _is_alone=is_alone,
        _masters="masters",
        _partitions=SimpleNamespace(upload=calls.append),
        _gather_weights=noted(calls, "gathered"),
    )
    optimizer.synchronize = noted(calls, "synchronized")
    optimizer.checkpoint_event_prologue()
    assert calls == (["synchronized"] if is_alone else ["masters", "gathered"])


def test_what_is_deferred_is_applied_before_a_wait(monkeypatch):
    calls = []
    monkeypatch.setattr(OffloadZeroOptimizer, "synchronize", noted(calls, "theirs"))
    optimizer = made()
    # While DeepSpeed's constructor makes it.
    optimizer.synchronize()
    assert calls == []
    optimizer._partitions = SimpleNamespace(finish=noted(calls, "finished"))
    optimizer.synchronize()
    assert calls == ["finished", "theirs"]


def test_a_gate_waits_for_landings_and_leaves_what_is_deferred():
    calls = []
    params = [torch.nn.Parameter(torch.zeros(1)) for _ in range(2)]
    uploads = deferred._DeferredUploads(
        SimpleNamespace(
            wait=lambda fragments: calls.append(list(fragments)) or "told",
            finish_job=noted(calls, "job finished"),
        ),
        dict(zip(params, ("first", "second"), strict=True)),
    )
    assert uploads.wait(params[::-1]) == "told"
    uploads.finish()
    assert calls == [["second", "first"], "job finished"]


# ---- late weights of several ranks ----


def watching(monkeypatch):
    said = []
    monkeypatch.setattr(deferred, "warn", said.append)
    optimizer = made(
        _is_alone=False,
        _has_warned=set(),
        _deferred=SimpleNamespace(interval=4),
        _partitions=SimpleNamespace(is_landed=False),
    )
    model = torch.nn.Linear(2, 2)
    optimizer.watch(model)
    return optimizer, model, said


def test_evaluation_with_late_weights_is_warned_of_once(monkeypatch):
    optimizer, model, said = watching(monkeypatch)
    model(torch.zeros(2))
    optimizer._partitions.is_landed = True
    model.eval()(torch.zeros(2))
    model.state_dict()
    assert said == []
    optimizer._partitions.is_landed = False
    for _ in range(2):
        model(torch.zeros(2))
    (forward,) = said
    assert "a forward in evaluation mode reads weights that lack up to 4 updates" in forward
    for _ in range(2):
        model.state_dict()
    assert "a state dict of the module has weights that lack up to 4 updates" in said[1]
    assert len(said) == 2


def test_a_module_outlives_its_optimizer(monkeypatch):
    optimizer, model, said = watching(monkeypatch)
    hook = deferred._LateUse(optimizer)
    assert len(model._forward_pre_hooks) == len(model._state_dict_pre_hooks) == 1
    del optimizer
    gc.collect()
    assert len(model._forward_pre_hooks) == len(model._state_dict_pre_hooks) == 0
    hook.forward(model.eval(), None)
    hook.state_dict()
    assert said == []
