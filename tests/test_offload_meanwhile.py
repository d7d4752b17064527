"""What a program does while a step waits for its norm: a signal's handler, or another thread."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

import pytest
import torch
from optim_cases import bits
from prepared_steps import KINDS, begun, call_behind_the_wait, made_as, preparing
from resident_models import assert_alike
from selected_models import train
from stepwell.offload import residents
from stepwell.offload.collector import DeviceCollector
from stepwell.offload.gate import Gate
from stepwell.offload.residents import Residents

if TYPE_CHECKING:
    from collections.abc import Callable

    from stepwell import OffloadAdamW
    from torch import nn

DEFERRED = ["deferred", "selected", "both", "q8"]
WRITES: dict[str, Callable[[torch.Tensor, torch.Tensor], None]] = {
    "in place": lambda param, value: param.detach().copy_(value),
    "data": lambda param, value: setattr(param, "data", value.clone()),
}


def bits_of(state: dict[Any, Any]) -> dict[Any, Any]:
    return {
        key: bits_of(value) if isinstance(value, dict) else bits(value).tolist()
        for key, value in state.items()
    }


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("what", ["state_dict", "drain", "model", "nothing"])
def test_a_handler_that_looks_while_the_norm_is_computed_is_as_good_as_before(
    monkeypatch: pytest.MonkeyPatch, kind: str, what: str
) -> None:
    runs = []
    for is_early in (True, False):
        with preparing(monkeypatch, is_early=is_early) as patched:
            runs.append(looked_at(patched, kind, what))
    assert runs[0][1] == runs[1][1]
    assert_alike(runs[0][0], runs[1][0])


def looked_at(patched: pytest.MonkeyPatch, kind: str, what: str) -> tuple[Any, Any]:
    """A run, and what a signal's handler has found in some of its steps."""
    model, optimizer = run = made_as(kind)
    looks: list[Any] = []
    handlers: dict[str, Callable[[], object]] = {
        "state_dict": lambda: looks.append(bits_of(optimizer.state_dict()["state"])),
        "drain": optimizer.drain,
        "model": lambda: looks.append(bits_of(model.state_dict())),
        "nothing": lambda: None,
    }
    for step in range(9):
        with patched.context() as handled:
            if step in (1, 4, 5):
                call_behind_the_wait(handled, handlers[what])
            train(*run, [step])
    return run, looks


@pytest.mark.parametrize("kind", DEFERRED)
def test_a_handler_that_drains_when_gradients_are_on_their_way_has_the_step_be_exact(
    monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    _, optimizer = run = made_as(kind)
    train(*run, range(3))
    assert optimizer._engine is not None and optimizer._engine.has_pending()
    take_missing = DeviceCollector.take_missing

    def taken(self: DeviceCollector, *args: Any) -> None:
        take_missing(self, *args)
        optimizer.drain()

    with monkeypatch.context() as patched:
        patched.setattr(DeviceCollector, "take_missing", taken)
        train(*run, [3])
    assert not optimizer._engine.has_pending()
    train(*run, range(4, 8))


@pytest.mark.parametrize("kind", KINDS)
def test_weights_that_a_view_has_from_then_on_are_there_when_the_step_returns(
    monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    model, optimizer = run = made_as(kind)
    train(*run, range(3))
    views: list[torch.Tensor] = []
    exposed: list[set[torch.Tensor]] = []
    opened = Gate.open

    def open_with(self: Gate, params: Any, found: set[torch.Tensor]) -> None:
        exposed.append(set(found))
        opened(self, params, found)

    monkeypatch.setattr(Gate, "open", open_with)
    call_behind_the_wait(
        monkeypatch, lambda: views.extend(param.detach() for param in model.parameters())
    )
    train(*run, [3])
    assert exposed == [set(optimizer._twins)]
    got = [bits(view) for view in views]
    optimizer.synchronize()
    assert all(torch.equal(one, bits(each)) for one, each in zip(got, views, strict=True))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("write", WRITES)
@pytest.mark.parametrize("at", [1, 3])
def test_a_write_to_weights_counts(
    monkeypatch: pytest.MonkeyPatch, kind: str, write: str, at: int
) -> None:
    model, optimizer = run = made_as(kind)
    train(*run, range(at))
    value = 3.0

    def handler() -> None:
        # After the first step channels are selected, and nothing is deferred yet.
        if at > 1:
            optimizer.drain()
        for param in model.parameters():
            WRITES[write](param, torch.full_like(param, value))

    with monkeypatch.context() as patched:
        call_behind_the_wait(patched, handler)
        train(*run, [at])
    # An update of Adam is about lr, and a weight of bfloat16 has 8 bits.
    most = 0.1
    optimizer.drain()
    for param in model.parameters():
        assert 0 < (param.detach().float() - value).abs().max() < most
    train(*run, range(at + 1, 8))


@pytest.mark.parametrize("kind", ["exact", "residents", "deferred", "q8"])
@pytest.mark.parametrize("write", WRITES)
def test_a_write_to_weights_is_as_one_before_the_step(
    monkeypatch: pytest.MonkeyPatch, kind: str, write: str
) -> None:
    runs = []
    for is_before in (True, False):
        _, optimizer = run = begun(kind)

        def handler(run: tuple[nn.Module, OffloadAdamW] = run) -> None:
            run[1].drain()
            for param in run[0].parameters():
                WRITES[write](param, param.detach() * 0.5)

        with monkeypatch.context() as patched:
            if is_before:
                handler()
            else:
                call_behind_the_wait(patched, handler)
            optimizer.step()
        train(*run, range(4, 8))
        runs.append(run)
    assert_alike(*runs)


@pytest.mark.parametrize("kind", DEFERRED)
def test_a_write_to_weights_whose_updates_are_deferred_is_refused(
    monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    model, optimizer = run = made_as(kind)
    train(*run, range(3))
    with monkeypatch.context() as patched, pytest.raises(ValueError, match="the writes are lost"):
        call_behind_the_wait(
            patched, lambda: [param.detach().zero_() for param in optimizer._twins]
        )
        train(*run, [3])
    train(*run, range(3, 8))
    assert all(param.detach().isfinite().all() for param in model.parameters())


@pytest.mark.parametrize("kind", DEFERRED)
@pytest.mark.parametrize("write", WRITES)
def test_a_write_to_a_weight_that_only_lands_with_the_step_is_refused(
    monkeypatch: pytest.MonkeyPatch, kind: str, write: str
) -> None:
    _, optimizer = begun(kind)
    *_, last = optimizer._twins
    last.grad = None
    assert optimizer._engine is not None and optimizer._engine.is_pending(last)
    with monkeypatch.context() as patched, pytest.raises(ValueError, match="the writes are lost"):
        call_behind_the_wait(patched, lambda: WRITES[write](last, torch.full_like(last, 3.0)))
        optimizer.step()
    assert torch.equal(bits(last.cpu()), bits(optimizer._twins.weight(last)))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("counter", [3, torch.tensor(3), torch.tensor(3.0, dtype=torch.float64)])
def test_a_count_of_updates_may_be_set(
    monkeypatch: pytest.MonkeyPatch, kind: str, counter: object
) -> None:
    runs = []
    for is_set in (True, False):
        _, optimizer = run = made_as(kind)
        train(*run, range(3))

        def handler(run: tuple[nn.Module, OffloadAdamW] = run) -> None:
            run[1].drain()
            for param in run[0].parameters():
                run[1].state[param]["step"] = counter

        with monkeypatch.context() as patched:
            call_behind_the_wait(patched, handler if is_set else optimizer.drain)
            train(*run, range(3, 4))
        train(*run, range(4, 7))
        runs.append(run)
    assert_alike(*runs)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("which", ["weights", "gradients"])
@pytest.mark.parametrize(
    "change",
    [lambda one: one.half(), lambda one: one[:1].clone(), lambda one: one.t().contiguous().t()],
    ids=["dtype", "shape", "strides"],
)
def test_what_is_not_as_it_was_checked_is_refused(
    monkeypatch: pytest.MonkeyPatch,
    kind: str,
    which: str,
    change: Callable[[torch.Tensor], torch.Tensor],
) -> None:
    model, optimizer = run = made_as(kind)
    train(*run, range(3))
    before = [bits(param) for param in model.parameters()]
    params = [param for param in model.parameters() if param.dim() == 2]

    def handler() -> None:
        optimizer.drain()
        before[:] = [bits(param) for param in model.parameters()]
        for param in params:
            changed = param if which == "weights" else param.grad
            assert changed is not None
            changed.data = change(changed.data)

    with monkeypatch.context() as patched, pytest.raises(ValueError, match="expected"):
        call_behind_the_wait(patched, handler)
        train(*run, [3])
    others = [param for param in model.parameters() if which == "gradients" or param.dim() != 2]
    found = [bits(param) for param in others]
    assert all(any(torch.equal(one, was) for was in before) for one in found)


@pytest.mark.parametrize("kind", KINDS)
def test_gradients_may_be_given_other_memory(monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    runs = []
    for moves in (True, False):
        model, _ = run = made_as(kind)

        def move(model: nn.Module = model) -> None:
            for param in model.parameters():
                if (grad := param.grad) is not None:
                    before, grad.data = grad.data, grad.data.clone()
                    before.fill_(7)

        with monkeypatch.context() as patched:
            if moves:
                call_behind_the_wait(patched, move)
            train(*run, range(6))
        runs.append(run)
    assert_alike(*runs)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("error", [None, KeyboardInterrupt()], ids=str)
def test_an_error_that_the_program_keeps_leaves_no_weight_shared(
    monkeypatch: pytest.MonkeyPatch, kind: str, error: BaseException | None
) -> None:
    # As sys.last_value and notebooks do.
    kept: list[BaseException] = []
    runs = []
    for keeps in (True, False):
        model, optimizer = run = made_as(kind, nonfinite="raise")
        train(*run, range(3))

        def fail(model: nn.Module = model) -> None:
            if error is not None:
                raise error

        with monkeypatch.context() as patched, contextlib.suppress(KeyboardInterrupt, ValueError):
            call_behind_the_wait(patched, fail)
            try:
                optimizer.zero_grad()
                for param in model.parameters():
                    param.grad = torch.full_like(param, float("nan"))
                optimizer.step()
            except BaseException as caught:
                if keeps:
                    kept.append(caught)
                raise
        assert not optimizer._background.exposed(list(optimizer._twins))
        train(*run, range(3, 8))
        runs.append(run)
    assert len(kept) == 1
    assert_alike(*runs)


@pytest.mark.parametrize("kind", ["exact", "deferred", "selected"])
def test_ctrl_c_while_a_step_is_submitted_leaves_no_weight_shared(
    monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    _, optimizer = run = made_as(kind)
    train(*run, range(3))
    opened, interrupt = Gate.open, KeyboardInterrupt()

    def interrupted(self: Gate, *args: Any) -> None:
        opened(self, *args)
        raise interrupt

    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(Gate, "open", interrupted)
        train(*run, [3])
    assert interrupt.__traceback__ is not None
    optimizer.synchronize()
    assert not optimizer._background.exposed(list(optimizer._twins))


@pytest.mark.parametrize("kind", ["exact", "residents", "deferred"])
def test_a_handler_that_saves_while_a_step_is_submitted_leaves_its_weights_awaited(
    monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    # Forwards wait for the weights of a step from here on, and it is submitted next.
    _, optimizer = run = made_as(kind)
    train(*run, range(3))
    under_way: list[bool] = []
    opened = Gate.open

    def saved(self: Gate, *args: Any) -> None:
        monkeypatch.undo()
        opened(self, *args)
        before = self.guard.any_under_way
        optimizer.state_dict()
        under_way.append(before and self.guard.any_under_way)

    monkeypatch.setattr(Gate, "open", saved)
    train(*run, [3])
    assert under_way == [True]


@pytest.mark.parametrize("is_behind", [False, True])
def test_a_handler_may_look_at_state_while_a_look_reads_it(
    monkeypatch: pytest.MonkeyPatch, *, is_behind: bool
) -> None:
    model, optimizer = run = made_as("residents")
    train(*run, range(3))
    (param,) = optimizer._residents
    value = 5.0
    looks: list[dict[str, Any]] = []

    def handler() -> None:
        monkeypatch.undo()
        looks.append(optimizer.state[param])
        looks[0]["exp_avg"].fill_(value)

    synchronize, host_state = Residents.synchronize, residents._host_state

    def synchronized(self: Residents) -> None:
        synchronize(self)
        handler()

    def read(*args: Any) -> Any:
        found = host_state(*args)
        handler()
        return found

    if is_behind:
        monkeypatch.setattr(residents, "_host_state", read)
    else:
        monkeypatch.setattr(Residents, "synchronize", synchronized)
    # What the handler has written is not read again over it.
    assert optimizer.state[param] is looks[0]
    assert (optimizer.state[param]["exp_avg"] == value).all()
    train(model, optimizer, [3])


def test_weights_that_are_written_again_and_again_do_not_keep_a_step_from_beginning(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    model, optimizer = run = made_as("exact")
    train(*run, range(2))
    opened = Gate.open

    def written(self: Gate, *args: Any) -> None:
        opened(self, *args)
        with torch.no_grad():
            next(model.parameters()).mul_(0.5)

    with monkeypatch.context() as patched:
        patched.setattr(Gate, "open", written)
        train(*run, [2])
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "what is written before it has begun is lost" in caplog.text
    assert {int(state["step"]) for state in optimizer.state.values()} == {3}
