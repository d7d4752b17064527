"""Random training programs on torch.optim.AdamW and both our AdamWs, side by side.

A program is a sequence of what people do to a model and its optimizer: backwards, steps, freezing,
writes, reads, state dicts, edits of groups. Every rule does the same to two equal models, one under
`AdamW`, the other under `OffloadAdamW` with the host as its device. What one returns the other has
to return, and what one refuses the other has to refuse.

- The two agree to the bit: losses, weights whichever way they are read, state, counts.
- torch.optim.AdamW takes each step from the same weights and moments, with the same gradients. The
  step count is its, and weights and moments are within the errors of a few fp32 operations
  (`optim_reference`). What happens between two steps, it is told by the rules and never by our
  optimizers.
- In most programs a first parameter of `BALLAST` elements makes the steps of `OffloadAdamW`
  take milliseconds, so that an access that does not wait finds an old weight.

Where ours differ from torch on purpose, a comment at the rule says so.
"""

import contextlib
import copy
import math
import sys
from unittest import mock

import hypothesis
import pytest
import stepwell
import torch
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule
from optim_cases import CODECS, DTYPES
from optim_programs import READS, WRITES, Net, Part, Run, other_values, saved, values, written
from optim_reference import Torch, assert_same
from stepwell import _core
from stepwell.store import gradients, staying

BALLAST = 1 << 19
SHAPES = [(), (0,), (1,), (33,), (5, 7), (2, 3, 4, 5), (_core.CHUNK_LEN + 70,)]


class Refused(str):
    """The message of a ValueError."""


def attempt(act, run):
    try:
        return act(run)
    except ValueError as error:
        return Refused(error)


# ---- what is drawn ----

INDEX = st.integers(0, 7)
SEEDS = st.integers(0, 2**16)
CLEAR = st.sampled_from(["none", "in place", "not"])
KINDS = st.sampled_from(["plain"] * 12 + ["zero", "small", "large", "nan", "inf"])
GROUPS = st.fixed_dictionaries(
    {
        "lr": st.sampled_from([1e-2, 1e-3, 0.1, 0.0]),
        "betas": st.sampled_from([(0.9, 0.999), (0.5, 0.9), (0.0, 0.95)]),
        "eps": st.sampled_from([1e-8, 1e-3]),
        "weight_decay": st.sampled_from([0.0, 0.01, 0.3]),
    }
)
PARTS = st.lists(
    st.tuples(st.sampled_from(SHAPES), st.sampled_from(DTYPES)), min_size=1, max_size=3
)
OPTIONS = st.fixed_dictionaries(
    {
        "moments": st.sampled_from(CODECS),
        "nonfinite": st.sampled_from(["skip", "raise", "propagate"]),
        "maximize": st.booleans(),
        "seed": st.integers(0, 3),
    }
)
OFFLOAD_OPTIONS = st.fixed_dictionaries(
    {
        "gate": st.sampled_from(["module", "module", "step"]),
        # Where weights are in host memory, so are sums, and the model is given.
        "weights": st.sampled_from(["device", "device", "host"]),
        # Of these which share may stay on the device.
        "staying": st.sampled_from([0, 0, 0.7, 1]),
        "accumulate": st.sampled_from(["device", "host"]),
        "accumulation_steps": st.sampled_from([None, None, 1, 2, 3]),
        "clip_norm": st.sampled_from([None, None, 0.5]),
    }
)


ROUNDS = st.lists(
    st.fixed_dictionaries(
        {
            "clear": CLEAR,
            "used": st.sampled_from([255, 255, 1, 6]),
            "kind": KINDS,
            "is_regularised": st.booleans(),
            # Between the backward and the step, and right after the step.
            "between": st.sampled_from(
                [
                    "nothing",
                    "nothing",
                    "accumulate",
                    "scale",
                    "scale by data",
                    "clear",
                    "set",
                    "clip",
                ]
            ),
            "then": st.sampled_from([*READS, *WRITES, *WRITES, "evaluate", "nothing"]),
            "index": INDEX,
            "seed": SEEDS,
        }
    ),
    min_size=1,
    max_size=4,
)


def training(number):
    """A rule that trains."""

    def train(self, rounds):
        self.train(rounds)

    train.__name__ = f"train_{number}"
    return rule(rounds=ROUNDS)(train)


class Programs(RuleBasedStateMachine):
    """Both models, torch's optimizer, and what the programs know of them."""

    @initialize(
        parts=PARTS,
        has_ballast=st.sampled_from([True, True, False]),
        options=OPTIONS,
        offload=OFFLOAD_OPTIONS,
        group=GROUPS,
    )
    def begin(self, parts, has_ballast, options, offload, group):
        self.before = (gradients.BATCH_BYTES, torch.get_num_threads())
        gradients.BATCH_BYTES = 0
        torch.set_num_threads(1)
        self.options, self.offload_options = options, offload
        if has_ballast:
            parts = [((BALLAST,), parts[0][1]), *parts]
        weights = [values(index, shape, dtype) for index, (shape, dtype) in enumerate(parts)]
        self.torch = Torch()
        self.runs = []
        self.skipped = 0
        self.snapshot = None
        for kind in (stepwell.AdamW, stepwell.OffloadAdamW):
            net = Net([weight.clone() for weight in weights])
            run = Run(net, None, [])
            run.optimizer = self.made(kind, net, [{"params": run.params, **group}])
            self.runs.append(run)
        self.torch.add(self.host.params)

    @property
    def host(self):
        return self.runs[0]

    @property
    def offload(self):
        return self.runs[1]

    @property
    def sums_on_host(self):
        return "host" in (self.offload_options["accumulate"], self.offload_options["weights"])

    def made(self, kind, net, groups):
        if kind is stepwell.AdamW:
            return kind(groups, **self.options)
        offload = {**self.offload_options, "threads": 1}
        staying_share = offload.pop("staying")
        if offload["weights"] == "host":
            nbytes = sum(param.nbytes for param in net.parameters())
            offload["device_bytes_max"] = math.ceil(staying_share * nbytes)
        is_given = offload.pop("gate") == "module" or offload["weights"] == "host"
        model = net if is_given else None
        offload["accumulate"] = "host" if self.sums_on_host else "device"
        # Beside what is fetched ahead of its use nothing of a small model would stay.
        with mock.patch.object(staying, "AHEAD_NUMEL", 1):
            return kind(groups, model=model, **self.options, **offload)

    def both(self, act):
        """Does the same to both, and returns what came of it, which has to be the same."""
        outcomes = [attempt(act, run) for run in (self.offload, self.host)]
        refused = [isinstance(outcome, Refused) for outcome in outcomes]
        assert refused[0] == refused[1], outcomes
        if not refused[0]:
            assert_same(*outcomes)
        return outcomes[0]

    def at(self, index):
        """Which parameter, of those there are."""
        return index % len(self.host.params)

    def teardown(self):
        if not hasattr(self, "runs"):
            return
        try:
            # Not where a rule has failed.
            if sys.exc_info()[0] is None:
                self.compare()
        finally:
            gradients.BATCH_BYTES, threads = self.before
            torch.set_num_threads(threads)
            torch.set_default_dtype(torch.float32)
            self.offload.synchronize()

    @rule()
    def compare(self):
        """All there is, once the step has ended."""
        self.both(self.state if self.offload_options["weights"] == "device" else self.state_read)
        self.both(lambda run: [param.detach() for param in run.params])
        if not self.sums_on_host:
            self.both(lambda run: [param.grad for param in run.params])
        assert [run.optimizer.skipped_steps for run in self.runs] == [self.skipped] * 2

    def state(self, run):
        return run.optimizer.state_dict()

    def state_read(self, run):
        """A state dict, as a step reads it that changes no weight.

        Of a weight that was written trailing bits are void, which some optimizers note at once, and
        others when they step it.
        """
        groups = copy.deepcopy(run.optimizer.state_dict())["param_groups"]
        params = [torch.nn.Parameter(param.detach().clone()) for param in run.params]
        new = dict(zip(run.params, params, strict=True))
        optimizer = stepwell.AdamW(
            [{"params": [new[p] for p in group["params"]]} for group in run.optimizer.param_groups],
            **{**self.options, "nonfinite": "propagate"},
        )
        optimizer.load_state_dict({**run.optimizer.state_dict(), "param_groups": groups})
        for group in optimizer.param_groups:
            group["lr"] = 0.0
        for param in optimizer.state:
            param.grad = torch.zeros_like(param)
        optimizer.step()
        return optimizer.state_dict()

    # ---- backwards ----

    def inputs(self, seed, used, kind):
        return [
            values(seed + index, param.shape, param.dtype, kind) if used >> index & 1 else None
            for index, param in enumerate(self.host.params)
        ]

    def backward(self, run, inputs, *, is_regularised=False):
        loss = run.net(inputs)
        if is_regularised:
            # Read past the modules. Its gradient depends on the weights.
            loss = loss + sum(param.float().square().sum() for param in run.params)
        if loss.requires_grad:
            loss.backward()
        return loss.item()

    @rule(
        seed=SEEDS,
        used=st.integers(0, 255),
        kind=KINDS,
        is_regularised=st.booleans(),
        is_last=st.sampled_from([True, True, False]),
    )
    def accumulate(self, seed, used, kind, is_regularised, is_last):
        inputs = self.inputs(seed, used, kind)

        def act(run):
            skips = run.is_offloaded and not is_last
            with run.optimizer.no_sync() if skips else contextlib.nullcontext():
                return self.backward(run, inputs, is_regularised=is_regularised)

        self.both(act)

    @rule(seed=SEEDS)
    def evaluate(self, seed):
        self.both(self.evaluated(seed))

    def evaluated(self, seed):
        """A function that evaluates the model of a run."""
        inputs = self.inputs(seed, -1, "plain")

        def act(run):
            run.net.eval()
            with torch.no_grad():
                loss = run.net(inputs).item()
            run.net.train()
            return loss

        return act

    def cleared(self, run, how):
        if how != "not":
            run.optimizer.zero_grad(set_to_none=how == "none")

    def clear(self, how):
        self.both(lambda run: self.cleared(run, how))

    @rule(index=INDEX, how=CLEAR)
    def clear_one(self, index, how):
        def act(run):
            param = run.params[self.at(index)]
            if how == "none":
                param.grad = None
            elif how == "in place" and param.grad is not None:
                param.grad.zero_()

        self.both(act)

    def scale_gradient(self, index, by_data):
        def act(run):
            grad = run.params[self.at(index)].grad
            if grad is not None:
                (grad.data if by_data else grad).mul_(0.5)

        self.both(act)

    @rule(index=INDEX, seed=SEEDS, kind=KINDS)
    def set_gradient(self, index, seed, kind):
        def act(run):
            param = run.params[self.at(index)]
            # On purpose: beside a device a frozen parameter may have no memory for its gradient.
            if param.requires_grad:
                param.grad = values(seed, param.shape, param.dtype, kind)

        self.both(act)

    def clip(self, norm):
        self.both(lambda run: torch.nn.utils.clip_grad_norm_(run.params, norm))

    # ---- steps ----

    def train(self, rounds):
        for each in rounds:
            seed, index, between = each["seed"], each["index"], each["between"]
            self.clear(each["clear"])
            backward = {key: each[key] for key in ("used", "kind", "is_regularised")}
            self.accumulate(seed, **backward, is_last=between != "accumulate")
            if between == "accumulate":
                self.accumulate(seed + 16, **backward, is_last=True)
            elif between == "clear":
                self.clear_one(index, "in place")
            elif between == "set":
                self.set_gradient(index, seed, "plain")
            elif between == "clip" and not self.sums_on_host:
                self.clip(0.1)
            elif between.startswith("scale") and not self.sums_on_host:
                self.scale_gradient(index, between == "scale by data")
            then = each["then"]
            if then == "evaluate":
                self._step(None, then=self.evaluated(seed))
            elif then in WRITES:
                self._step(None, then=written(then, index, seed))
            else:
                self._step(None, then=READS.get(then))

    # Rules are drawn alike, and most of a program is to be training.
    train_1, train_2, train_3, train_4 = map(training, range(1, 5))
    train_5, train_6, train_7, train_8 = map(training, range(5, 9))

    @rule(seed=SEEDS, kind=KINDS)
    def train_by_closure(self, seed, kind):
        inputs = self.inputs(seed, 255, kind)

        def closure(run):
            run.optimizer.zero_grad()
            return self.backward(run, inputs)

        self._step(closure)

    @rule()
    def step(self):
        self._step(None)

    @rule(index=INDEX, option=st.sampled_from([("lr", -1.0), ("betas", (0.9, 1.0))]))
    def refused_step(self, index, option):
        """It changes nothing, and the step after it is as if it had not been."""
        key, value = option

        def act(run):
            groups = run.optimizer.param_groups
            group = groups[index % len(groups)]
            before, group[key] = group[key], value
            try:
                run.optimizer.step()
            finally:
                group[key] = before

        assert isinstance(self.both(act), Refused)

    @precondition(lambda self: not self.sums_on_host)
    @rule(seed=SEEDS, is_inf=st.booleans())
    def step_by_scaler(self, seed, is_inf):
        """What torch.amp.GradScaler does."""
        inputs = self.inputs(seed, 255, "plain")
        self.both(lambda run: self.cleared(run, "none"))
        self.both(lambda run: self.backward(run, inputs))
        self._step(None, scale=4.0, found_inf=is_inf)

    @torch.no_grad()
    def _step(self, closure, scale=None, found_inf=False, then=None):
        """Steps both, does `then` to each right after, and compares with torch."""
        weights = {param: param.detach().clone() for param in self.host.params}
        has_state = any(self.host.optimizer.state.values())
        offload, host = self.offload.optimizer, self.host.optimizer
        if scale is not None:
            for each in (offload, host):
                each.grad_scale = torch.tensor(scale, dtype=torch.float32)
                each.found_inf = torch.tensor(float(found_inf), dtype=torch.float32)
        with torch.enable_grad():
            one = attempt(
                lambda run: offload.step(closure and (lambda: closure(run))), self.offload
            )
            # Before anything else, which would give the background time.
            seen = then and then(self.offload)
            coefficient = 1.0
            norm = offload.grad_norm
            if offload.clip_norm is not None and norm is not None and not math.isnan(norm):
                # On purpose: clip_norm multiplies in fp32 what torch.nn.utils.clip_grad_norm_
                # rounds to the gradients' dtype. An infinite norm leaves 0 and NaN.
                coefficient = min(1.0, offload.clip_norm / (norm + 1e-6))
            # GradScaler has no infinite scale; of this one nothing is left in fp32 either.
            divisor = (scale or 1.0) / coefficient if coefficient else 1e300
            if divisor != 1.0:
                host.grad_scale = torch.tensor(divisor, dtype=torch.float64)
            other = attempt(lambda run: host.step(closure and (lambda: closure(run))), self.host)
        for each in (offload, host):
            each.__dict__.pop("grad_scale", None)
            each.__dict__.pop("found_inf", None)
        assert isinstance(one, Refused) == isinstance(other, Refused), (one, other)
        if not isinstance(one, Refused):
            assert_same(one, other)
        decision = self.decided(has_state, found_inf)
        assert isinstance(one, Refused) == (decision == "refuse"), one
        self.skipped += decision == "skip"
        assert [run.optimizer.skipped_steps for run in self.runs] == [self.skipped] * 2
        if decision == "step":
            self.torch.step(self.host, weights, coefficient / (scale or 1.0))
        else:
            assert_same(list(weights.values()), list(weights))
        if then is not None:
            with torch.enable_grad():
                assert_same(seen, then(self.host))

    def decided(self, has_state, found_inf):
        """What a step had to do, with the gradients that are there."""
        groups = self.host.optimizer.param_groups
        grads = [param.grad for param in self.host.params if param.grad is not None]
        if found_inf:
            return "skip"
        if (
            not all(grad.isfinite().all() for grad in grads)
            and self.options["nonfinite"] != "propagate"
        ):
            return {"skip": "skip", "raise": "refuse"}[self.options["nonfinite"]]
        is_zero = not any(grad.any() for grad in grads)
        if is_zero and not has_state and all(group["lr"] == 0 for group in groups):
            # On purpose: by such a step torch.distributed.checkpoint has state made.
            return "make state"
        return "step"

    # ---- parameters ----

    @rule(index=INDEX, is_trained=st.booleans())
    def freeze_or_thaw(self, index, is_trained):
        for run in self.runs:
            run.params[self.at(index)].requires_grad_(is_trained)

    @rule(index=INDEX, seed=SEEDS, how=st.sampled_from(list(WRITES)))
    def write(self, index, seed, how):
        self.both(written(how, index, seed))

    @rule(index=INDEX, seed=SEEDS)
    def write_unseen(self, index, seed):
        """Without a change of version."""

        def act(run):
            param = run.params[self.at(index)]
            param.data.copy_(other_values(seed, param))

        self.both(act)

    @rule(seed=SEEDS)
    def load_model(self, seed):
        def act(run):
            run.net.load_state_dict(
                {
                    name: other_values(seed + index, param)
                    for index, (name, param) in enumerate(run.net.named_parameters())
                }
            )

        self.both(act)

    # ---- groups ----

    @rule(index=INDEX, key=st.sampled_from(["lr", "betas", "eps", "weight_decay"]), group=GROUPS)
    def change_option(self, index, key, group):
        def act(run):
            groups = run.optimizer.param_groups
            groups[index % len(groups)][key] = group[key]

        self.both(act)

    @rule(norm=st.sampled_from([None, 0.5, 3.0]))
    def change_clip_norm(self, norm):
        self.offload.optimizer.clip_norm = norm

    @rule(index=INDEX)
    def reorder(self, index):
        """Within a group."""
        for optimizer in (*(run.optimizer for run in self.runs), self.torch.optimizer):
            groups = optimizer.param_groups
            groups[index % len(groups)]["params"].reverse()
        self.snapshot = None

    @precondition(lambda self: len(self.host.params) < 6)
    @rule(seed=SEEDS, shape=st.sampled_from(SHAPES), dtype=st.sampled_from(DTYPES), group=GROUPS)
    def add_group(self, seed, shape, dtype, group):
        for run in self.runs:
            run.net.parts.append(Part(values(seed, shape, dtype)))
            run.optimizer.add_param_group({"params": run.params[-1:], **group})
        self.torch.add(self.host.params[-1:])
        self.snapshot = None

    @rule(dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float64]))
    def change_default_dtype(self, dtype):
        torch.set_default_dtype(dtype)

    # ---- state ----

    @rule(index=INDEX)
    def delete_state(self, index):
        for run in self.runs:
            run.optimizer.state.pop(run.params[self.at(index)], None)
        self.torch.drop(self.order()[self.at(index)], self.host.params[self.at(index)])

    def order(self):
        """torch's tensor for each parameter, as the model has them."""
        params = [param for group in self.host.optimizer.param_groups for param in group["params"]]
        tensors = dict(zip(params, self.torch.tensors(), strict=True))
        return [tensors[param] for param in self.host.params]

    @rule()
    def save(self):
        self.snapshot = (
            [copy.deepcopy(run.optimizer.state_dict()) for run in self.runs],
            copy.deepcopy(self.torch.saved()),
            self.skipped,
        )
        assert_same(*self.snapshot[0])

    @precondition(lambda self: self.snapshot is not None)
    @rule(is_exchanged=st.booleans())
    def load(self, is_exchanged):
        packed, theirs, self.skipped = copy.deepcopy(self.snapshot)
        for run, found in zip(self.runs, packed[:: -1 if is_exchanged else 1], strict=True):
            run.optimizer.load_state_dict(found)
        self.torch.load(theirs)

    @rule()
    def load_from_torch(self):
        """The state that torch's optimizer would have now."""
        packed = self.torch.optimizer.state_dict()
        groups = zip(packed["param_groups"], self.host.optimizer.param_groups, strict=True)
        # Torch keeps what `load_into_torch` has brought it.
        self.skipped = max(own.get("skipped_steps", live["skipped_steps"]) for own, live in groups)
        for run in self.runs:
            run.optimizer.load_state_dict(copy.deepcopy(packed))
        self.torch.was_loaded(self.host)

    @rule()
    def load_into_torch(self):
        decoded = self.both(lambda run: run.optimizer.decoded_state_dict())
        self.torch.optimizer.load_state_dict(copy.deepcopy(decoded))

    @rule(which=st.sampled_from([[0], [1], [0, 1]]), is_copied=st.booleans())
    def resume(self, which, is_copied):
        """With a new optimizer, or a new model as well; the other goes on as if nothing were."""
        for run in self.runs:
            run.optimizer.zero_grad()
        for run in (self.runs[index] for index in which):
            packed = saved(run.optimizer.state_dict())
            groups, params = run.optimizer.param_groups, run.params
            if is_copied:
                run.net = copy.deepcopy(run.net)
            new = dict(zip(params, run.params, strict=True))
            for param, copied in new.items():
                # What `other_values` goes by, of which torch copies nothing.
                vars(copied).update(vars(param))
            run.optimizer = self.made(
                type(run.optimizer),
                run.net,
                [{"params": [new[param] for param in group["params"]]} for group in groups],
            )
            run.optimizer.load_state_dict(packed)


# To find a shorter program that fails as well takes minutes, which is left to profiles that search.
_PROFILE = hypothesis.settings()
TestPrograms = pytest.mark.timeout(0)(Programs.TestCase)
TestPrograms.settings = hypothesis.settings(
    max_examples=25 if _PROFILE.derandomize else _PROFILE.max_examples,
    stateful_step_count=30,
    phases=set(hypothesis.Phase) - ({hypothesis.Phase.shrink} if _PROFILE.derandomize else set()),
    suppress_health_check=list(hypothesis.HealthCheck),
)
