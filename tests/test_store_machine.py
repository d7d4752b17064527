"""Random programs over state in each place, with updates in time or late: the bits of `AdamW`.

A program trains, writes weights and state, freezes, saves and goes on elsewhere: in host memory, on
the device, on a volume, or after a crash from what was committed. What it does to a model under
`OffloadAdamW` it does to an equal one under `stepwell.AdamW`, which has one place and is never late
(`test_optim_programs` compares that one with torch's).

- Gradients do not depend on weights, so with fp32 moments late updates come to the same bits once
  all are applied. Every look at a weight before the next forward applies them, and the step after
  it is exact. So programs with late updates are looked at by rules alone (`look`, `save`).
- `agree` says what has to hold after each rule. What a commit has is the other model as it was
  (`Snapshot`).
"""

import contextlib
import copy
import gc
import shutil
import sys
import tempfile
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

import hypothesis
import optim_programs
import pytest
import stepwell
import torch
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from optim_cases import DTYPES
from optim_programs import READS, Net, Part, Run, saved, values
from optim_reference import assert_same

# Some chunks and a part of one: what is smaller is not on a volume that commits nothing.
LARGE = (200_001,)
SMALL = [(0,), (1,), (33,), (5, 7), (3, 1, 11)]
# Where state is: in host memory, all or a little of it on the device, what is large on a volume.
ON_DEVICE = {"device": 1 << 30, "part": 12 * 40, "part and volume": 12 * 40}
ON_VOLUME = ["volume", "part and volume", "commit"]
# The device has fp32 moments only.
PLACES = {"fp32": ["memory", *ON_DEVICE, "volume", "commit"], "q8": ["memory", "volume", "commit"]}


def by_array(param, new):
    param.detach().view(-1).view(torch.uint8).numpy()[:] = new.view(-1).view(torch.uint8).numpy()


def by_data(param, new):
    param.data.copy_(new)


WRITES = {**optim_programs.WRITES, "array": by_array}
# By which no use of a parameter is seen, between a forward and the step behind it.
UNSEEN = {"data": by_data, "array": by_array}


def halve(optimizer, param):
    optimizer.state[param]["exp_avg"].mul_(0.5)


def delete(optimizer, param):
    del optimizer.state[param]


def replace(optimizer, param):
    optimizer.state[param] = copy.deepcopy(optimizer.state[param])


def replace_all(optimizer, param):
    optimizer.state = defaultdict(dict, {param: optimizer.state[param]})


EDITS = {"fp32": [halve, delete, replace, replace_all], "q8": [delete, replace, replace_all]}


@dataclass
class Commit:
    """What a volume has to have."""

    number: int
    """Of the step."""
    model: tuple | None
    """Weights, and state by parameter; None: a program has written what no step has."""


# ---- what is drawn ----

INDEX = st.integers(0, 7)
SEEDS = st.integers(0, 2**16)
ROUND = st.fixed_dictionaries(
    {
        "seed": SEEDS,
        "used": st.sampled_from([255, 255, 255, 1, 2, 6]),
        "kind": st.sampled_from([*["plain"] * 7, "zero", "nan"]),
        "by_hand": st.booleans(),
    }
)
DEFERRED = st.none() | st.builds(
    stepwell.Deferred, interval=st.integers(1, 4), predict=st.booleans()
)
OPTIONS = st.fixed_dictionaries(
    {"lr": st.sampled_from([1e-2, 0.1]), "weight_decay": st.sampled_from([0.0, 0.3])}
)


class Programs(RuleBasedStateMachine):
    """Both models with their optimizers, and what a program has done to them."""

    @initialize(
        parts=st.lists(
            st.tuples(st.sampled_from(SMALL), st.sampled_from(DTYPES)), min_size=1, max_size=3
        ),
        large=st.tuples(INDEX, st.sampled_from(DTYPES)),
        moments=st.sampled_from(["fp32", "fp32", "q8"]),
        place=INDEX,
        deferred=DEFERRED,
        interval=st.integers(1, 4),
        options=OPTIONS,
    )
    def begin(self, parts, large, moments, place, deferred, interval, options):
        self.threads = torch.get_num_threads()
        torch.set_num_threads(1)
        self.folder = Path(tempfile.mkdtemp(prefix="stepwell-"))
        parts.insert(large[0] % (len(parts) + 1), (LARGE, large[1]))
        weights = [values(index, *part) for index, part in enumerate(parts)]
        self.moments, self.options, self.interval = moments, options, interval
        self.ours, self.other = (
            Run(Net([weight.clone() for weight in weights]), None, []) for _ in range(2)
        )
        self.runs = (self.ours, self.other)
        self.skipped = 0
        self.other.optimizer = self.made_other()
        self.open(place, deferred)

    # ---- optimizers ----

    def groups(self, run):
        """The parameters of a model with their names, in the groups that there are."""
        last = self.other.optimizer
        names = iter([name for name, _ in run.net.named_parameters()])
        params = iter(run.params)
        sizes = [len(group["params"]) for group in last.param_groups] if last else [len(run.params)]
        return [{"params": [(next(names), next(params)) for _ in range(size)]} for size in sizes]

    def made_other(self):
        options = {"moments": self.moments, "nonfinite": "skip", **self.options}
        return stepwell.AdamW(self.groups(self.other), **options)

    def open(self, place, deferred):
        """Makes an optimizer whose state is in a place, the drawn number of those there are."""
        places = PLACES[self.moments]
        self.place = places[place % len(places)]
        self.commits = self.place == "commit"
        # Coded moments are coded once per turn, so bits differ. No commit has late gradients.
        self.deferred = None if self.commits or self.moments == "q8" else deferred
        # Whether a step was late since all updates were applied.
        self.is_pending = False
        # Steps that were taken, and the last commit.
        self.number, self.committed = 0, Commit(0, None)
        # Parameters that were written or loaded, or their state, and not stepped since.
        self.unsaved = set()
        self.volume = self.folder / str(len(list(self.folder.iterdir())))
        self.volume.mkdir()
        if self.commits:
            # It has no parameters that thaw later.
            self.freeze(slice(None), is_trained=True)
        self.ours.optimizer = self.made()

    def made(self, **volume):
        options = {**self.options, "moments": self.moments, "threads": 1, "model": self.ours.net}
        options["device_bytes_max"] = ON_DEVICE.get(self.place, 0)
        if self.place not in ON_VOLUME:
            return stepwell.OffloadAdamW(self.groups(self.ours), deferred=self.deferred, **options)
        volume["durability"] = "none"
        if self.commits:
            volume |= {"durability": "commit", "name": "run", "commit_interval": self.interval}
        options["tier"] = stepwell.Volume([self.volume], **volume)
        # The least that it works with, and some for parameters to come.
        for nbytes in range(1 << 18, 1 << 26, 1 << 18):
            with contextlib.suppress(ValueError):
                return stepwell.OffloadAdamW(
                    self.groups(self.ours),
                    deferred=self.deferred,
                    host_bytes_max=nbytes,
                    **options,
                )
        raise AssertionError("no host memory is enough")

    def close(self):
        self.ours.optimizer = None
        gc.collect()

    def teardown(self):
        if not hasattr(self, "ours"):
            return
        try:
            # Not where a rule has failed.
            if sys.exc_info()[0] is None:
                self.save()
        finally:
            self.close()
            shutil.rmtree(self.folder)
            torch.set_num_threads(self.threads)

    # ---- what has to hold ----

    @invariant()
    def agree(self):
        """Both models are the same to the bit, as far as a look at them changes nothing."""
        optimizers = [run.optimizer for run in self.runs]
        assert [each.skipped_steps for each in optimizers] == [self.skipped] * 2
        if not self.is_pending:
            assert_same(*([param.detach() for param in run.params] for run in self.runs))
        if self.commits:
            self.ours.optimizer.synchronize()
            assert self.ours.optimizer.committed_steps == self.committed.number

    def both(self, act):
        """Does the same to both, which has to come to the same, with all updates applied."""
        assert_same(*(act(run) for run in self.runs))
        self.is_pending = False

    @rule()
    def save(self):
        """All there is: state and counts too."""
        self.both(lambda run: run.optimizer.state_dict())
        self.agree()

    @rule(how=st.sampled_from(list(READS)))
    def look(self, how):
        self.both(READS[how])

    @rule(seed=SEEDS)
    def evaluate(self, seed):
        @torch.no_grad()
        def act(run):
            loss = run.net.eval()([values(seed, p.shape, p.dtype) for p in run.params])
            run.net.train()
            return loss

        self.both(act)

    @rule()
    def drain(self):
        self.ours.optimizer.drain()
        self.is_pending = False

    @rule()
    def synchronize(self):
        self.ours.optimizer.synchronize()

    # ---- steps ----

    @rule(rounds=st.lists(ROUND, min_size=1, max_size=6))
    def train(self, rounds):
        for each in rounds:
            self.step(**each)

    train_more, train_on = train, train

    def backward(self, run, seed, used, kind, *, by_hand):
        """Leaves gradients that depend on the arguments only."""
        run.optimizer.zero_grad()
        inputs = [
            values(seed + index, param.shape, param.dtype, kind) if used >> index & 1 else None
            for index, param in enumerate(run.params)
        ]
        loss = run.net(inputs)
        if not by_hand and loss.requires_grad:
            loss.backward()
        for param, grad in zip(run.params, inputs, strict=True):
            if by_hand and param.requires_grad:
                param.grad = grad

    def step(self, **how):
        for run in self.runs:
            self.backward(run, **how)
            run.optimizer.step()
        self.note_step()

    def note_step(self):
        """What both have to have done with the gradients that are there."""
        grads = [param.grad for param in self.other.params]
        if all(grad is None for grad in grads):
            return
        if not all(grad is None or grad.isfinite().all() for grad in grads):
            self.skipped += 1
            # What is late is applied by a step that applies nothing.
            self.is_pending = False
            return
        self.is_pending = self.deferred is not None
        self.number += 1
        self.unsaved -= {
            param for param, grad in zip(self.ours.params, grads, strict=True) if grad is not None
        }
        if self.commits and (self.number == 1 or self.number % self.interval == 0):
            self.committed = self.commit_of_now()

    @rule(value=st.sampled_from([1e-3, 0.0, 0.1]))
    def change_lr(self, value):
        self.options["lr"] = value
        for group in self.ours.optimizer.param_groups + self.other.optimizer.param_groups:
            group["lr"] = value

    # ---- writes ----

    def at(self, run, index):
        return run.params[index % len(run.params)]

    def write_one(self, run, index, seed, write):
        param = self.at(run, index)
        write(param, values(seed, param.shape, param.dtype))

    @rule(index=INDEX, seed=SEEDS, how=st.sampled_from(list(WRITES)))
    def write(self, index, seed, how):
        self.both(lambda run: self.write_one(run, index, seed, WRITES[how]))
        self.unsaved.add(self.at(self.ours, index))

    @rule(
        how=ROUND,
        index=INDEX,
        seed=SEEDS,
        write=st.sampled_from(list(UNSEEN)),
        drains=st.booleans(),
    )
    def write_unseen(self, how, index, seed, write, drains):
        """Behind a forward. It counts, or is refused since updates are late, which are applied."""
        self.backward(self.ours, **how)
        self.write_one(self.ours, index, seed, UNSEEN[write])
        optimizer = self.ours.optimizer
        try:
            (optimizer.drain if drains else optimizer.step)()
        except ValueError:
            assert self.is_pending
            self.is_pending = False
            return
        self.backward(self.other, **how)
        self.write_one(self.other, index, seed, UNSEEN[write])
        self.unsaved.add(self.at(self.ours, index))
        if drains:
            self.is_pending = False
        else:
            self.other.optimizer.step()
            self.note_step()

    @rule(index=INDEX, edit=INDEX)
    def edit_state(self, index, edit):
        edits = EDITS[self.moments]

        def act(run):
            param = self.at(run, index)
            if run.optimizer.state.get(param):
                edits[edit % len(edits)](run.optimizer, param)

        self.both(act)
        self.unsaved.update(self.ours.params)

    # ---- parameters ----

    @rule(index=INDEX, is_trained=st.booleans())
    def freeze_or_thaw(self, index, is_trained):
        self.freeze(slice(index, index + 1), is_trained=is_trained)

    def freeze(self, which, *, is_trained):
        for run in self.runs:
            for param in run.params[which]:
                param.requires_grad_(is_trained)

    @precondition(lambda self: not self.commits and len(self.ours.params) < 6)
    @rule(seed=SEEDS, shape=st.sampled_from(SMALL), dtype=st.sampled_from(DTYPES))
    def add_group(self, seed, shape, dtype):
        for run in self.runs:
            run.net.parts.append(Part(values(seed, shape, dtype)))
            name = list(dict(run.net.named_parameters()))[-1]
            run.optimizer.add_param_group({"params": [(name, run.params[-1])]})
        self.is_pending = False

    # ---- places ----

    @rule(place=INDEX, deferred=DEFERRED)
    def go_on_elsewhere(self, place, deferred):
        packed = saved(self.ours.optimizer.state_dict())
        self.close()
        self.open(place, deferred)
        self.ours.optimizer.load_state_dict(packed)
        self.unsaved = set(self.ours.params)

    def commit_of_now(self):
        if self.unsaved:
            return Commit(self.number, None)
        weights = [param.detach().clone() for param in self.other.params]
        return Commit(self.number, (weights, saved(self.other.optimizer.state_dict())["state"]))

    @precondition(lambda self: self.commits and self.number)
    @rule()
    def commit(self):
        self.ours.optimizer.commit()
        if self.committed.number != self.number:
            self.committed = self.commit_of_now()

    @precondition(lambda self: self.commits and self.number)
    @rule(is_killed=st.booleans())
    def resume(self, is_killed):
        """Another model goes on from what the last commit has."""
        committed = self.committed
        if not is_killed and committed.number != self.number:
            # The end of an optimizer commits its last step.
            committed = self.commit_of_now()
        if committed.model is None:
            return
        if is_killed:
            # What a crash would leave.
            left = self.folder / str(len(list(self.folder.iterdir())))
            shutil.copytree(self.volume, left)
            self.volume = left
        self.close()
        weights, state = committed.model
        for run in self.runs:
            run.net = copy.deepcopy(run.net)
            for index, (param, weight) in enumerate(zip(run.params, weights, strict=True)):
                # What was never stepped is the program's.
                is_read = run is self.ours and index in state
                param.data.copy_(weight if not is_read else torch.zeros_like(weight))
        self.freeze(slice(None), is_trained=True)
        self.ours.optimizer = self.made(resume=True)
        self.other.optimizer = self.made_other()
        packed = self.other.optimizer.state_dict()
        self.other.optimizer.load_state_dict({**packed, "state": state})
        self.skipped, self.number, self.unsaved = 0, committed.number, set()
        self.committed = committed


# To find a shorter program that fails as well takes minutes, which is left to profiles that search.
_PROFILE = hypothesis.settings()
TestPrograms = pytest.mark.timeout(0)(Programs.TestCase)
TestPrograms.settings = hypothesis.settings(
    max_examples=30 if _PROFILE.derandomize else _PROFILE.max_examples,
    stateful_step_count=12,
    phases=set(hypothesis.Phase) - ({hypothesis.Phase.shrink} if _PROFILE.derandomize else set()),
    suppress_health_check=list(hypothesis.HealthCheck),
)
