"""Parameters that `OffloadAdamW` takes on and lets go of, and the engine that has them."""

import weakref

import pytest
import stepwell
import torch
from insides import background_of, engine_of, has_host_side, make_late
from stepwell.store import host_side


def param_of(*shape):
    return torch.nn.Parameter(torch.ones(*shape))


def stepped(optimizer, *params):
    for param in params:
        param.grad = torch.ones_like(param)
    optimizer.step()
    optimizer.synchronize()


def test_a_new_parameter_that_shares_memory_is_refused_and_changes_nothing():
    first = param_of(4)
    optimizer = stepwell.OffloadAdamW([("first", first)], threads=1)
    shared = torch.nn.Parameter(first.data[1:3])
    with pytest.raises(ValueError, match="shares memory with"):
        optimizer.add_param_group({"params": [("shared", shared)]})
    assert not has_host_side(optimizer, shared)
    stepped(optimizer, first)
    assert optimizer.state[first]["step"].item() == 1


def test_what_the_engine_has_for_deferral_counts_once_where_a_parameter_is_added(monkeypatch):
    held, announce = [], host_side.announce

    def noted(*args, **options):
        held.append((options["held"], options["waiting"]))
        return announce(*args, **options)

    monkeypatch.setattr(host_side, "announce", noted)
    first = param_of(4000)
    deferred = stepwell.Deferred(interval=4)
    optimizer = stepwell.OffloadAdamW([("first", first)], deferred=deferred, threads=1)
    # Without an engine nothing is taken, and with one what was announced first.
    optimizer.add_param_group({"params": [("second", param_of(5))]})
    stepped(optimizer, first)
    optimizer.add_param_group({"params": [("third", param_of(6))]})
    (_, _), (before, taken), (after, _) = held
    assert before == 0
    assert after == taken > 0


def test_a_parameter_that_has_gone_is_in_no_engine():
    """Its memory would be freed under an engine that has pinned it."""
    stays, goes = param_of(4), param_of(5)
    optimizer = stepwell.OffloadAdamW([("stays", stays), ("goes", goes)], threads=1)
    stepped(optimizer, stays, goes)
    engine = weakref.ref(engine_of(optimizer))
    del optimizer.param_groups[0]["params"][1]
    stepped(optimizer, stays)
    assert engine() is None
    assert not has_host_side(optimizer, goes)


@pytest.mark.parametrize("is_deferred", [False, True])
def test_a_gradient_is_taken_by_an_engine_without_a_step_unless_that_is_deferred(is_deferred):
    deferred = stepwell.Deferred(interval=2) if is_deferred else None
    param = param_of(4)
    optimizer = stepwell.OffloadAdamW([("param", param)], deferred=deferred, threads=1)
    stepped(optimizer, param)
    late = make_late(optimizer)
    late.keep_busy = True
    late.waits.clear()
    assert background_of(optimizer).idle() is engine_of(optimizer)
    assert bool(late.waits) is not is_deferred
