"""Which channels a `Selector` chooses, and in which steps: over gradients that tests make up."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from stepwell import Deferred
from stepwell.store.deferred import Extents, deferred_core
from stepwell.store.selection import Selected, Selector

CPU = torch.device("cpu")
SIZE = 8


class Steps:
    """Matrices `a`, `b`, ..., and a vector `v`, under a selector; steps in turns."""

    def __init__(
        self, count: int = 2, *, interval: int = 2, columns: int = SIZE, **options: Any
    ) -> None:
        deferred = Deferred(interval=interval, **{"fraction": 0.25, "reselect": 3, **options})
        self.names = [*"abcd"[:count], "v"]
        shapes = [*([(SIZE, columns)] * count), (SIZE,)]
        extents = Extents.of([torch.empty(shape) for shape in shapes])
        # Its segments are one per tensor.
        self.core, _ = deferred_core(CPU, "cpu", extents, deferred, 1)
        segments = self.core.selectable()
        assert [self.names[one.tensor] for one in segments] == self.names
        self.group_of = {self.names[one.tensor]: one.group for one in segments}
        self.segment_of = {self.names[one.tensor]: one.segment for one in segments}
        self.selector = Selector(segments, self.names, deferred.reselect, CPU)
        self.grads = {
            name: torch.ones(shape) for name, shape in zip(self.names, shapes, strict=True)
        }

    def step(
        self, group: int | None, at_once: set[str] | None = None, without: str = ""
    ) -> dict[str, tuple[bool, list[int]]]:
        """What a step selects: an exact one, or the turn of a group. Some have no gradient."""
        names = [name for name in self.names if name not in without]
        self.selector.score(names, [self.grads[name] for name in names], group)
        if group is not None and at_once is None:
            at_once = set()
        return self.named(self.selector.choose(at_once))

    def needs_exact(self) -> bool:
        return self.selector.needs_exact

    def named(self, chosen: list[Selected]) -> dict[str, tuple[bool, list[int]]]:
        names = {segment: name for name, segment in self.segment_of.items()}
        return {names[segment]: (axis, channels) for segment, axis, channels in chosen}


# Of a vector, which is one row.
WHOLE = (False, [0])


def test_an_exact_step_selects_where_the_norms_are() -> None:
    steps = Steps()
    assert steps.selector.share == 0
    steps.grads["a"][[2, 5]] = 10.0
    steps.grads["b"][:, [0, 7]] = 20.0
    assert steps.step(None) == {"a": (False, [2, 5]), "b": (True, [0, 7]), "v": WHOLE}
    assert not steps.needs_exact()
    chosen, rest = 16 * (100 + 400), 2 * 48
    assert steps.selector.share == pytest.approx(chosen / (chosen + rest))
    for grad in steps.grads.values():
        grad *= 1e-3
    steps.step(None)
    assert steps.selector.share == pytest.approx(chosen / (chosen + rest))
    # What is not finite says nothing of the share.
    steps.grads["a"][0, 0] = torch.inf
    share_of_b = 16 * 400 / (16 * 400 + 48)
    steps.step(None)
    assert steps.selector.share == pytest.approx(share_of_b)
    steps.selector.reset()
    assert steps.selector.share == 0


def test_channels_are_chosen_anew_in_the_first_turn_that_is_late_enough() -> None:
    steps = Steps(reselect=3)
    assert steps.group_of["a"] != steps.group_of["b"]
    steps.step(None)
    found = {"a": [], "b": [], "v": []}  # type: ignore[var-annotated]
    for number in range(1, 13):
        for name in steps.step(number % 2):
            found[name].append(number)
    for name, numbers in found.items():
        # Of every fourth step it is the turn: three is not enough of two.
        first = next(number for number in (3, 4) if number % 2 == steps.group_of[name])
        assert numbers == list(range(first, 13, 4)), name


def test_what_a_step_updates_at_once_is_not_selected_and_due_in_its_next_turn() -> None:
    steps = Steps(reselect=100)
    steps.step(None)
    group = steps.group_of["a"]
    steps.selector.drop(["a"])
    assert not steps.selector.holds(["a"])
    assert steps.selector.holds(["a", "b"])
    assert "a" not in steps.step(group, at_once={"a"})
    assert not steps.selector.holds(["a"])
    assert set(steps.step(1 - group)) == set()
    assert set(steps.step(group)) == {"a"}
    assert steps.selector.holds(["a"])
    # It has a selection, and is due by none: what updates it ends that.
    steps.step(group, at_once={"a"})
    assert steps.selector.holds(["a"])
    steps.selector.reset()
    assert not steps.selector.holds(steps.names)
    assert not steps.selector.holds([])


def test_a_selection_that_is_due_ends_where_the_step_updates_at_once() -> None:
    steps = Steps(reselect=1)
    steps.step(None)
    group = steps.group_of["a"]
    share = steps.selector.share
    steps.grads["a"][3:5] = 100.0
    steps.step(group, at_once={"a"})
    assert not steps.selector.holds(["a"])
    # Nor does it count in the share.
    assert steps.selector.share == share


@pytest.mark.parametrize("scored", ["none", "a group"])
def test_an_exact_step_without_all_scores_is_followed_by_another(scored: str) -> None:
    steps = Steps(reselect=1)
    steps.step(None)
    if scored == "none":
        steps.selector.score([], [], None)
    else:
        steps.selector.score(steps.names, list(steps.grads.values()), 0)
    assert steps.selector.choose(None) == []
    assert steps.needs_exact()
    assert not steps.selector.holds(steps.names)
    assert steps.selector.share == 0
    assert set(steps.step(None)) == set(steps.names)
    assert not steps.needs_exact()
    # A step that was not scored selects nothing.
    assert steps.selector.choose(set()) == []
    assert not steps.needs_exact()
    assert steps.selector.choose(None) == []
    assert steps.needs_exact()


def test_of_narrow_matrices_rows_are_selected() -> None:
    """A column is more than they may have."""
    steps = Steps(1, columns=2)
    steps.grads["a"][[1, 4]] = 10.0
    assert steps.step(None)["a"] == (False, [1, 4])


def test_what_has_no_gradient_is_selected_in_the_first_turn_with_one() -> None:
    steps = Steps(interval=1, reselect=100)
    assert set(steps.step(None, without="a")) == {"b", "v"}
    assert not steps.needs_exact()
    assert steps.step(0, without="a") == {}
    assert set(steps.step(0)) == {"a"}
    assert steps.step(0) == {}
