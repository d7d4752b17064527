"""A signal's handler that saves, or writes weights, at any line of a step."""

from __future__ import annotations

from itertools import count
from typing import TYPE_CHECKING, Any

import pytest
from prepared_steps import BEFORE, begun
from selected_models import train
from step_lines import step_with_handler

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from stepwell import OffloadAdamW
    from torch import nn

    Run = tuple[nn.Module, OffloadAdamW]

# Prime, so that loops are met at any place.
EVERY = 29


def ended(run: Run, left: int) -> Run:
    train(*run, range(BEFORE + 1, BEFORE + 1 + left))
    return run


def handled(kind: str, handler: Callable[[Run], object], left: int) -> Iterator[Run]:
    """Runs whose handler came at one line of a step after the other, `left` steps later."""
    for line in count(1, EVERY):
        run = begun(kind)
        if not step_with_handler(run[1], line, lambda run=run: handler(run)):
            return
        yield ended(run, left)


def bits_of(run: Run) -> list[Any]:
    state = run[1].state_dict()["state"]
    values = [value for each in state.values() for value in each.values()]
    return [each.detach().float().tolist() for each in [*run[0].parameters(), *values]]


def save(run: Run) -> None:
    model, optimizer = run
    [each.clone() for each in model.state_dict().values()]
    optimizer.state_dict()


def before_and_behind(kind: str, handler: Callable[[Run], object], left: int) -> list[Any]:
    """What comes of it where the handler is called before the step, and behind it."""
    expected = []
    for is_before in (True, False):
        run = begun(kind)
        if is_before:
            handler(run)
        run[1].step()
        if not is_before:
            handler(run)
        expected.append(bits_of(ended(run, left)))
    return expected


@pytest.mark.parametrize("kind", ["exact", "residents", "deferred", "q8"])
@pytest.mark.parametrize("left", [0, 3])
def test_a_step_in_which_a_checkpoint_is_saved_is_as_one_before_or_behind_it(
    kind: str, left: int
) -> None:
    # A save applies what is deferred, and is no matter without that.
    expected = before_and_behind(kind, save, left)
    found = list(map(bits_of, handled(kind, save, left)))
    assert all(each in expected for each in found)
    # It came in time, and too late.
    assert found[0] == expected[0]
    assert found[-1] == expected[1]


@pytest.mark.parametrize("kind", ["selected", "both"])
def test_a_checkpoint_may_be_saved_at_any_line_of_a_step_with_selected_channels(kind: str) -> None:
    for run in handled(kind, save, 3):
        model, optimizer = run
        optimizer.drain()
        steps = {int(state["step"]) for state in optimizer.state_dict()["state"].values()}
        assert steps == {BEFORE + 4}
        assert all(param.detach().isfinite().all() for param in model.parameters())


@pytest.mark.parametrize("kind", ["exact", "residents"])
def test_a_step_in_which_state_is_loaded_is_taken_or_refused(kind: str) -> None:
    for line in count(1, EVERY):
        run = begun(kind)
        before, saved = bits_of(run), run[1].state_dict()

        def load(run: Run = run, saved: dict[str, Any] = saved) -> None:
            run[1].load_state_dict(saved)

        try:
            was_there = step_with_handler(run[1], line, load)
        except ValueError as error:
            assert "nothing was changed" in str(error)
            assert bits_of(run) == before
        else:
            if not was_there:
                return
            assert bits_of(run) != before
