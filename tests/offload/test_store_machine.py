"""Random programs over state in each place, with updates in time or late: the bits of `AdamW`.

A program trains, writes weights and state, freezes, saves and goes on elsewhere: in host memory, on
the device, on a volume, or after a crash from what was committed. What it does to a model under
`OffloadAdamW` it does to an equal one under `stepwell.AdamW`, which has one place and is never late
(`test_optim_programs` compares that one with torch's).

- Gradients do not depend on weights, so with fp32 moments late updates come to the same bits once
  all are applied. A look applies them, and the step after it is exact: so what is late is looked at
  by rules alone.
- `agree` says what has to hold after each rule, `note_step` what a step does, `Commit` what a
  volume has to have.
"""

import contextlib
import copy
import gc
import itertools
import shutil
import sys
import tempfile
from collections import defaultdict
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import hypothesis
import optim_programs
import pytest
import stepwell
import torch
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from optim_cases import DTYPES
from optim_programs import READS, Net, Part, Run, other_values, saved, values
from optim_reference import assert_same

# Some chunks and a part of one: what is smaller is in memory beside a volume that commits nothing.
LARGE = (399, 503)
SMALL = [(1,), (33,), (5, 7), (3, 1, 11)]
# Where state is: in host memory, all or a little of it on the device, what is large on a volume.
ON_DEVICE = {"device": 1 << 30, "part": 12 * 40, "part and volume": 12 * 40}
ON_VOLUME = ["volume", "part and volume", "commit"]
PLACES = ["commit", "memory", "volume", *ON_DEVICE]


# ---- what programs do between steps: to a run, a parameter, or an optimizer and a parameter ----


@torch.no_grad()
def without_gradients(run):
    return run.net([torch.ones(param.shape, dtype=param.dtype) for param in run.params])


def evaluated(run):
    run.net.eval()
    loss = without_gradients(run)
    run.net.train()
    return loss


def drained(run):
    if run.is_offloaded:
        run.optimizer.drain()
    return [param.detach() for param in run.params]


def complete(run):
    run.synchronize()
    return [param.detach() for param in run.params]


def by_array(param, new):
    memory = param.detach().view(-1).view(torch.uint8).numpy()
    memory[:] = new.view(-1).view(torch.uint8).numpy()


def by_data(param, new):
    param.data.copy_(new)


def halve(optimizer, param):
    optimizer.state[param]["exp_avg"].mul_(0.5)


def delete(optimizer, param):
    del optimizer.state[param]


def put_in_place(optimizer, param):
    optimizer.state[param] = copy.deepcopy(optimizer.state[param])


def replace_all(optimizer, param):
    optimizer.state = defaultdict(dict, {param: optimizer.state[param]})


LOOKS = [*READS.values(), evaluated, without_gradients, drained, complete]
WRITES = [*optim_programs.WRITES.values(), by_array]
UNSEEN = [by_data, by_array, optim_programs.WRITES["data"]]
EDITS = {
    "fp32": [halve, delete, put_in_place, replace_all],
    "q8": [delete, put_in_place, replace_all],
}

# ---- what is drawn ----

INDEX, SEEDS = st.integers(0, 7), st.integers(0, 2**16)
GRADIENTS = st.fixed_dictionaries(
    {
        "seed": SEEDS,
        # Which parameters have one.
        "used": st.sampled_from([255, 255, 255, 1, 2, 6]),
        "kind": st.sampled_from([*["plain"] * 9, "zero", "nan"]),
        "by_hand": st.booleans(),
    }
)
STEPS = st.lists(GRADIENTS, min_size=2, max_size=8)
DEFERRED = st.sampled_from(
    [
        *[None] * 4,
        *(
            stepwell.Deferred(
                interval=interval, predict=predict, fraction=fraction, reselect=2 * interval
            )
            for interval, predict, fraction in itertools.product(
                [4, 3, 2, 1], [True, False], [0.3, 0.0]
            )
        ),
    ]
)


class Commit(NamedTuple):
    """What a volume has to have."""

    number: int
    """Of the last step that it has."""
    model: tuple | None
    """Weights, and states by index. None: a program has written what no step has, and a commit may
    have it or not."""


class Programs(RuleBasedStateMachine):
    """Both models with their optimizers, and what a program has done to them."""

    @initialize(
        parts=st.lists(
            st.tuples(st.sampled_from(SMALL), st.sampled_from(DTYPES)), min_size=1, max_size=3
        ),
        large=st.tuples(INDEX, st.sampled_from(DTYPES)),
        moments=st.sampled_from(["fp32", "fp32", "q8"]),
        weight_decay=st.sampled_from([0.0, 0.3]),
        place=st.sampled_from(PLACES),
        deferred=DEFERRED,
        interval=st.sampled_from([3, 1, 8]),
    )
    def begin(self, parts, large, moments, weight_decay, place, deferred, interval):
        self.threads = torch.get_num_threads()
        torch.set_num_threads(1)
        self.folder = Path(tempfile.mkdtemp(prefix="stepwell-"))
        parts.insert(large[0] % (len(parts) + 1), (LARGE, large[1]))
        weights = [values(index, *part) for index, part in enumerate(parts)]
        self.options = {"lr": 1e-2, "weight_decay": weight_decay, "moments": moments}
        self.interval, self.skipped = interval, 0
        self.runs = [Run(Net([each.clone() for each in weights]), None, []) for _ in range(2)]
        self.other.optimizer = self.made_other()
        self.open(place, deferred)

    @property
    def ours(self):
        return self.runs[0]

    @property
    def other(self):
        return self.runs[1]

    def at(self, run, index):
        return run.params[index % len(run.params)]

    # ---- optimizers ----

    def groups(self, run):
        """The parameters of a model with their names, in the groups that there are."""
        named = list(run.net.named_parameters())
        last = self.other.optimizer
        sizes = [len(group["params"]) for group in last.param_groups] if last else [len(named)]
        return [{"params": [named.pop(0) for _ in range(size)]} for size in sizes]

    def made_other(self):
        return stepwell.AdamW(self.groups(self.other), nonfinite="skip", **self.options)

    def open(self, place, deferred):
        """Makes an optimizer whose state is in a place."""
        moments = self.options["moments"]
        # The device has fp32 moments.
        self.place = "memory" if moments == "q8" and place in ON_DEVICE else place
        self.commits = self.place == "commit"
        # Moments that are coded are coded once per turn. A volume that commits has nothing late.
        self.deferred = None if self.commits or moments == "q8" else deferred
        if self.deferred is not None and self.place in ON_VOLUME:
            # No channels are selected of what is on drives.
            self.deferred = replace(self.deferred, fraction=0.0)
        # Whether a step may be late since all updates were applied.
        self.is_pending = False
        # Steps that were taken, and the last commit.
        self.number, self.committed = 0, Commit(0, None)
        # Parameters that were written or loaded, or their state, and not stepped since.
        self.unsaved = set()
        self.volume = self.new_folder()
        self.volume.mkdir()
        if self.place in ON_VOLUME:
            # Parameters that thaw later may be refused: a commit lacks them, or memory.
            self.freeze(slice(None), is_trained=True)
        self.ours.optimizer = self.made()

    def new_folder(self):
        return self.folder / str(len(list(self.folder.iterdir())))

    def made(self, **volume):
        options = {**self.options, "model": self.ours.net, "threads": 1, "deferred": self.deferred}
        options["device_bytes_max"] = ON_DEVICE.get(self.place, 0)
        if self.place not in ON_VOLUME:
            return stepwell.OffloadAdamW(self.groups(self.ours), **options)
        if self.commits:
            volume |= {"name": "run", "commit_interval": self.interval}
        durability = "commit" if self.commits else "none"
        options["tier"] = stepwell.Volume([self.volume], durability=durability, **volume)
        # The least that it works with: more of the state would be in host memory.
        for nbytes in range(1 << 18, 1 << 26, 1 << 18):
            with contextlib.suppress(ValueError):
                groups = self.groups(self.ours)
                return stepwell.OffloadAdamW(groups, host_bytes_max=nbytes, **options)
        raise AssertionError("no host memory is enough")

    def close(self):
        self.ours.optimizer = None
        gc.collect()

    def teardown(self):
        if not hasattr(self, "runs"):
            return
        try:
            # Not where a rule has failed.
            if sys.exc_info()[0] is None:
                self.look(None)
        finally:
            self.close()
            shutil.rmtree(self.folder)
            torch.set_num_threads(self.threads)

    # ---- what has to hold ----

    @invariant()
    def agree(self):
        """Both models are the same to the bit, as far as a look at them changes nothing."""
        assert [run.optimizer.skipped_steps for run in self.runs] == [self.skipped] * 2
        if not self.is_pending:
            assert_same(*([param.detach() for param in run.params] for run in self.runs))
        if self.commits:
            self.ours.optimizer.synchronize()
            assert self.ours.optimizer.committed_steps == self.committed.number

    def both(self, act):
        """Does the same to both, which has to come to the same, with all updates applied."""
        assert_same(*(act(run) for run in self.runs))
        self.is_pending = False

    @rule(how=st.none() | st.sampled_from(LOOKS))
    def look(self, how):
        """By default at all there is: weights, and state dicts."""
        self.both(how or self.packed)
        self.agree()

    def packed(self, run):
        packed = run.optimizer.state_dict()
        for index, param in enumerate(self.ours.params):
            if param in self.unsaved:
                # Of a weight that was written. One optimizer drops it here, one in the next step.
                for name in ("trailing", "master", "fingerprints"):
                    packed["state"].get(index, {}).pop(name, None)
        return packed

    # ---- steps ----

    @rule(steps=STEPS)
    def train(self, steps):
        for gradients in steps:
            for run in self.runs:
                self.backward(run, **gradients)
                run.optimizer.step()
            self.note_step()

    train_on = train_more = train

    def backward(self, run, seed, used, kind, *, by_hand):
        """A forward, and gradients that depend on the arguments only."""
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

    def note_step(self):
        """What a step has done with the gradients that are there."""
        grads = dict(zip(self.ours.params, (p.grad for p in self.other.params), strict=True))
        grads = {param: grad for param, grad in grads.items() if grad is not None}
        if not all(grad.isfinite().all() for grad in grads.values()):
            self.skipped += 1
            # A step that applies nothing applies what is late.
            self.is_pending = False
        elif grads:
            self.is_pending = self.deferred is not None
            self.number += 1
            self.unsaved -= set(grads)
            if self.commits and (self.number == 1 or self.number % self.interval == 0):
                self.committed = self.last_step()

    @rule(lr=st.sampled_from([1e-3, 0.0, 0.1]))
    def change_lr(self, lr):
        self.options["lr"] = lr
        for run in self.runs:
            for group in run.optimizer.param_groups:
                group["lr"] = lr

    # ---- writes ----

    def written(self, index, seed, write):
        """A function that writes a parameter of a run."""
        new = other_values(seed, self.at(self.other, index))

        def act(run):
            write(self.at(run, index), new)

        self.unsaved.add(self.at(self.ours, index))
        return act

    @rule(index=INDEX, seed=SEEDS, how=st.sampled_from(WRITES))
    def write(self, index, seed, how):
        self.both(self.written(index, seed, how))

    @rule(
        steps=STEPS, index=INDEX, seed=SEEDS, how=st.sampled_from(UNSEEN), is_drained=st.booleans()
    )
    def write_unseen(self, steps, index, seed, how, is_drained):
        """Behind a forward. It counts, or is refused and lost, where updates are late."""
        # A step that is skipped is counted, and refused as well.
        *before, gradients = [*steps[:-1], {**steps[-1], "kind": "plain"}]
        self.train(before)
        write = self.written(index, seed, how)
        self.backward(self.ours, **gradients)
        write(self.ours)
        try:
            (self.ours.optimizer.drain if is_drained else self.ours.optimizer.step)()
        except ValueError:
            assert self.is_pending
            self.is_pending = False
            return
        self.backward(self.other, **gradients)
        write(self.other)
        if is_drained:
            self.is_pending = False
        else:
            self.other.optimizer.step()
            self.note_step()

    @rule(index=INDEX, edit=INDEX)
    def edit_state(self, index, edit):
        edits = EDITS[self.options["moments"]]

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

    @precondition(lambda self: self.place not in ON_VOLUME and len(self.ours.params) < 6)
    @rule(seed=SEEDS, shape=st.sampled_from(SMALL), dtype=st.sampled_from(DTYPES))
    def add_group(self, seed, shape, dtype):
        for run in self.runs:
            run.net.parts.append(Part(values(seed, shape, dtype)))
            named = list(run.net.named_parameters())[-1:]
            run.optimizer.add_param_group({"params": named, "lr": self.options["lr"]})
        self.is_pending = False

    # ---- places ----

    @rule(place=st.sampled_from(PLACES), deferred=DEFERRED)
    def go_on_elsewhere(self, place, deferred):
        packed = saved(self.ours.optimizer.state_dict())
        self.close()
        self.open(place, deferred)
        self.ours.optimizer.load_state_dict(packed)
        self.unsaved = set(self.ours.params)

    def last_step(self):
        """What a commit of the last step has."""
        weights = [param.detach().clone() for param in self.other.params]
        states = saved(self.other.optimizer.state_dict())["state"]
        return Commit(self.number, None if self.unsaved else (weights, states))

    @precondition(lambda self: self.commits and self.number)
    @rule(commits=st.booleans(), then=st.sampled_from(["crash", "end", "go on"]))
    def commit(self, commits, then):
        """Other models may go on from what the last commit has."""
        committed = self.committed
        # The end of an optimizer commits its last step too.
        if (commits or then == "end") and committed.number != self.number:
            committed = self.last_step()
        if commits:
            self.ours.optimizer.commit()
            self.committed = committed
        if then == "go on" or committed.model is None:
            return
        if then == "crash":
            # What it would leave.
            self.volume = shutil.copytree(self.volume, self.new_folder())
        self.close()
        self.committed, (self.number, (weights, states)) = committed, committed
        self.skipped, self.unsaved = 0, set()
        for run in self.runs:
            run.net = copy.deepcopy(run.net)
            for index, (param, weight) in enumerate(zip(run.params, weights, strict=True)):
                # What was never stepped is the program's.
                is_read = run is self.ours and index in states
                param.data.copy_(torch.zeros_like(weight) if is_read else weight)
        self.freeze(slice(None), is_trained=True)
        self.ours.optimizer = self.made(resume=True)
        self.other.optimizer = self.made_other()
        packed = self.other.optimizer.state_dict()
        self.other.optimizer.load_state_dict({**packed, "state": states})

    commit_again = commit_more = commit


# To find a shorter program that fails as well takes minutes, which is left to profiles that search.
_PROFILE = hypothesis.settings()
TestPrograms = pytest.mark.timeout(0)(Programs.TestCase)
TestPrograms.settings = hypothesis.settings(
    max_examples=80 if _PROFILE.derandomize else _PROFILE.max_examples,
    stateful_step_count=12,
    phases=set(hypothesis.Phase) - ({hypothesis.Phase.shrink} if _PROFILE.derandomize else set()),
    suppress_health_check=list(hypothesis.HealthCheck),
)
