"""What a rank tells the others before a step, and what it does then. The others are stand-ins."""

import logging
from contextlib import contextmanager

import pytest
import torch
import torch.distributed as dist
from stepwell._hyper import Hyper
from stepwell.ranks.peers import StepFacts
from stepwell.ranks.sharding import Sharding, UpdateFacts, _digest, open_sharding
from stepwell.ranks.shares import Shares

HYPER = Hyper(0.1, (0.9, 0.999), 1e-8, 0.0, True, True, False)
FACTS = StepFacts(has_error=False, found_inf=False, is_written=False)


class Peers:
    """Another rank, which tells `facts`, and whose first weight that differs is `difference`."""

    def __init__(self, facts):
        self.facts, self.difference = facts, None
        self.told, self.digests, self.opened, self.num_awaited = [], [], [], 0

    def agree_on_step(self, mine, params, settings):
        self.told.append((mine, params, settings))
        return StepFacts(*(here or there for here, there in zip(mine, self.facts, strict=True)))

    def first_difference(self, digests):
        self.digests.append(list(digests))
        return self.difference

    @contextmanager
    def awaited(self):
        self.num_awaited += 1
        yield

    def open_data(self, device):
        self.opened.append(device)


def sharing(facts=FACTS):
    found = object.__new__(Sharding)
    found.peers, found.shares, found._replicas = Peers(facts), Shares(0, 2), None
    return found


def update_of(hyper=HYPER, step=1, seed=0):
    return UpdateFacts(hyper, step, seed)


def agree(sharding, params, facts=FACTS):
    return sharding.agree(
        params,
        [update_of() for _ in params],
        clip_norm=None,
        nonfinite="skip",
        has_error=facts.has_error,
        found_inf=facts.found_inf,
        is_rounded=False,
        is_written=facts.is_written,
        checksums=lambda tensors: [tensor.sum() for tensor in tensors],
        label=lambda param: f"weight {[each is param for each in params].index(True)}",
    )


def facts_of_each():
    return [FACTS, *(FACTS._replace(**{name: True}) for name in StepFacts._fields)]


@pytest.mark.parametrize("theirs", facts_of_each(), ids=lambda facts: str(sum(facts)))
@pytest.mark.parametrize("mine", facts_of_each(), ids=lambda facts: str(sum(facts)))
def test_weights_are_compared_where_a_rank_has_written_and_all_step(mine, theirs):
    params = [torch.ones(3), torch.ones(4)]
    sharding = sharing(theirs)
    sharding.shares.add(params)
    has_error, found_inf, is_written = map(any, zip(mine, theirs, strict=True))
    assert agree(sharding, params, mine) == (found_inf, has_error)
    told, peers = sharding.peers.told, sharding.peers
    if mine.has_error or mine.found_inf:
        # It may have no parameters to tell of.
        assert told == [(mine, 0, 0)]
    else:
        digests = (
            sharding.shares.digest(params),
            _digest([update_of()] * 2, None, "skip", is_rounded=False),
        )
        assert told == [(mine, *digests)]
    is_taken = not has_error and not found_inf
    assert len(peers.digests) == peers.num_awaited == int(is_taken and is_written)
    assert peers.opened == [torch.device("cpu")] * is_taken


def test_a_step_of_nothing_is_agreed_on_and_compares_nothing():
    sharding = sharing(FACTS._replace(is_written=True))
    assert agree(sharding, []) == (False, False)
    assert len(sharding.peers.told) == 1
    assert not sharding.peers.digests
    assert not sharding.peers.opened


def test_a_weight_that_differs_is_named():
    params = [torch.ones(3), torch.ones(4)]
    sharding = sharing()
    sharding.shares.add(params)
    sharding.peers.difference = 1
    with pytest.raises(ValueError, match=r"weight 1 is not the same on all ranks(.|\n)*hint"):
        agree(sharding, params, FACTS._replace(is_written=True))
    assert not sharding.peers.opened
    (digests,) = sharding.peers.digests
    assert len(set(digests)) == 2
    # They and their negatives are words of a round.
    assert all(0 <= each < 1 << 62 for each in digests)


def test_settings_that_count_are_in_the_digest():
    def digest(updates=None, clip_norm=1.0, nonfinite="skip", *, is_rounded=True):
        updates = [update_of(), update_of()] if updates is None else updates
        return _digest(updates, clip_norm, nonfinite, is_rounded=is_rounded)

    other = HYPER._replace(lr=0.2)
    found = [
        digest(),
        digest(clip_norm=None),
        digest(clip_norm=2.0),
        digest(nonfinite="raise"),
        digest([update_of(other), update_of(other)]),
        digest([update_of(), update_of(other)]),
        digest([update_of(other), update_of()]),
        digest([update_of(), update_of(step=2)]),
        digest([update_of(), update_of(seed=1)]),
        digest([update_of()]),
    ]
    assert len(set(found)) == len(found)
    assert all(0 <= each < 1 << 62 for each in found)
    assert digest() == digest([update_of(), update_of()])
    # Where nothing is rounded a seed is nothing.
    seeds = [digest([update_of(seed=seed)], is_rounded=False) for seed in range(2)]
    assert seeds[0] == seeds[1]


@pytest.mark.parametrize("mine", [None, "none", "commit"])
def test_volumes_of_another_kind_are_an_error(mine):
    sharding = sharing()
    sharding.check_durability(mine)
    sharding.peers.difference = 0
    what = f"a `tier` of durability `{mine}`" if mine else "no `tier`"
    with pytest.raises(ValueError, match=rf"this rank has {what}, others have not(.|\n)*hint"):
        sharding.check_durability(mine)


def test_volumes_of_each_kind_are_told_apart():
    sharding = sharing()
    for mine in (None, "none", "commit", None):
        sharding.check_durability(mine)
    first, *others, last = sharding.peers.digests
    assert first == last
    assert len({first[0], *(each for (each,) in others)}) == 3


def test_parameters_whose_rows_do_not_follow_each_other_are_refused():
    sharding = sharing()
    good, bad = torch.zeros(3, 4), torch.zeros(3, 4).t()
    with pytest.raises(ValueError, match=r"`w` has the strides `\(1, 4\)` and `shard`(.|\n)*hint"):
        sharding.admit([good, bad], {good: "`v`", bad: "`w`"})
    assert good not in sharding.shares
    sharding.admit([good], {good: "`v`"})
    assert good in sharding.shares


@pytest.mark.parametrize("world_size", [None, 1, 2])
def test_ranks_that_each_keep_all_state_are_told_once(monkeypatch, caplog, world_size):
    monkeypatch.setattr(dist, "is_initialized", lambda: world_size is not None)
    if world_size:
        monkeypatch.setattr(dist, "get_world_size", lambda: world_size)
    with caplog.at_level(logging.INFO, logger="stepwell"):
        assert open_sharding(False, deferred=True, accumulate="host", durability=None) is None
    assert ("each of 2 ranks keeps the state" in caplog.text) == (world_size == 2)
    assert bool(caplog.text) == (world_size == 2)
