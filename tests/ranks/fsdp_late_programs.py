"""What runs on two ranks of FSDP2 whose steps are late: see `late_engine`.

Every reader of a shard has to wait for it by itself. What is read is compared with what is read
where `step()` waits.
"""

import contextlib
import copy
import itertools
import os
import pickle

import insides
import pytest
import stepwell
import torch
import torch.distributed as dist
from insides import is_any_under_way, make_in_time, make_late, protection_of_writes
from late_engine import LateEngine
from optim_cases import bits
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

STEPS = 3
MIXED = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


class Scale(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = torch.nn.Parameter(torch.ones(5))

    def forward(self, x):
        return torch.tanh(x) * self.scale


class Deep(torch.nn.Module):
    """Blocks of FSDP2's, and a layer of the root: uneven and empty shards among them.

    Parameters are those of modules within, which are called when they were gathered.
    """

    def __init__(self):
        super().__init__()
        self.layers = torch.nn.ModuleList(
            torch.nn.Sequential(torch.nn.Linear(5, 5), Scale()) for _ in range(3)
        )
        self.last = torch.nn.Linear(5, 1)

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return self.last(x)


def deep(*, prefetch=False, **options):
    torch.manual_seed(0)
    net, mesh = Deep(), init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in net.layers:
        fully_shard(layer, mesh=mesh, **options)
    fully_shard(net, mesh=mesh, **options)
    if prefetch:
        layers = list(net.layers)
        for layer, ahead in itertools.pairwise(layers):
            layer.set_modules_to_forward_prefetch([ahead])
            ahead.set_modules_to_backward_prefetch([layer])
    return net


class Placed(torch.nn.Module):
    """No FSDP2: a DTensor that the program itself computes with."""

    def __init__(self):
        super().__init__()
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        self.weight = torch.nn.Parameter(distribute_tensor(torch.eye(5, 3), mesh))

    def forward(self, x):
        return x @ self.weight.full_tensor()


MODELS = {
    "plain": deep,
    "reshard_after_forward=False": lambda: deep(reshard_after_forward=False),
    "prefetch": lambda: deep(prefetch=True),
    "mixed precision": lambda: deep(mp_policy=MIXED),
}


def backward(net, step):
    x = torch.linspace(-1, 1, 20).view(4, 5) + 0.1 * step + 0.5 * dist.get_rank()
    loss = net(x).square().mean()
    loss.backward()
    return loss.item()


def started(make, gate, **options):
    """A model after its first step, and what makes the following ones late: all but the first."""
    net = make()
    optimizer = stepwell.OffloadAdamW(
        net.named_parameters(), lr=0.1, model=net if gate == "module" else None, **options
    )
    backward(net, 0)
    optimizer.step()
    optimizer.zero_grad()
    late = make_late(optimizer) if gate == "module" else None
    return net, optimizer, late


def nothing(*_):
    return None


def run(make, gate, looks=(nothing,) * STEPS, context=contextlib.nullcontext):
    """Losses, what each of `looks` has found behind a step of its own, and weights.

    Forwards and backwards are in a `context`.
    """
    net, optimizer, late = started(make, gate)
    found = []
    for step, look in enumerate(looks, 1):
        with context():
            found.append(backward(net, step))
        optimizer.step()
        optimizer.zero_grad()
        assert late is None or (insides.forwards_wait(optimizer) and late.is_late)
        found.append(look(net, optimizer))
        assert late is None or late.is_late == (look is nothing), step
    optimizer.synchronize()
    assert all(type(param) is DTensor for param in net.parameters())
    return found, [bits(param.detach().to_local()) for param in net.parameters()]


def assert_equal(one, other):
    assert one[0] == other[0]
    for mine, expected in zip(one[1], other[1], strict=True):
        assert torch.equal(mine, expected)


def forwards_wait():
    for make in MODELS.values():
        assert_equal(run(make, "module"), run(make, "step"))


def forwards_wait_without_torch_functions():
    without = torch._C.DisableTorchFunctionSubclass
    for name in ("prefetch", "mixed precision"):
        assert_equal(run(MODELS[name], "module", context=without), run(MODELS[name], "step"))


def own_shards_only():
    """What a part of the model waits for: its own shards and, where it prefetches, the next."""
    waited = []
    for make in (deep, MODELS["prefetch"]):
        net, optimizer, late = started(make, "module")
        backward(net, 1)
        optimizer.step()
        net.layers[0].unshard()
        places = {each[1] for each in late.waits if each[0] == "wait" and each[1:]}
        names = [name for name, _ in net.named_parameters()]
        waited.append({names[place] for place in places})
        net.layers[0].reshard()
        optimizer.synchronize()
    assert waited == [{f"layers.0.{name}" for name in ("0.weight", "0.bias", "1.scale")}] * 2


# ---- readers ----


def in_evaluation(net, _):
    with torch.no_grad():
        found = net.eval()(torch.ones(2, 5)).tolist()
    net.train()
    # A backward would have done so.
    net.reshard()
    return found


def unsharded(net, _):
    net.layers[1].unshard()
    found = net.layers[1][0].weight.tolist()
    net.layers[1].reshard()
    return found


def weight(net):
    return net.layers[1][0].weight


def to_local_without_grad(net, _):
    with torch.no_grad():
        return weight(net).to_local().tolist()


def average(net, _):
    with torch.no_grad():
        found = torch.zeros_like(weight(net)).lerp_(weight(net), 0.5)
        return found.to_local().tolist()


def written(net, _):
    with torch.no_grad():
        weight(net).mul_(0.5)


# Those that are not collective.
LOCAL = (
    lambda net, _: weight(net).to_local().tolist(),
    to_local_without_grad,
    lambda net, _: weight(net)._local_tensor.tolist(),
    lambda net, _: weight(net).data.to_local().tolist(),
    lambda net, _: weight(net).detach().to_local().tolist(),
    lambda net, _: (weight(net) * 2).to_local().tolist(),
    lambda net, _: net.state_dict()["layers.1.0.weight"].to_local().tolist(),
    lambda net, _: get_model_state_dict(net)["layers.1.0.weight"].to_local().tolist(),
    lambda net, _: copy.deepcopy(weight(net)).to_local().tolist(),
    lambda net, _: pickle.loads(pickle.dumps(weight(net).to_local())).tolist(),
    lambda net, _: torch._foreach_add([weight(net)], 1)[0].to_local().tolist(),
    lambda net, optimizer: optimizer.state[weight(net)]["exp_avg"].to_local().tolist(),
    lambda _, optimizer: optimizer.state_dict()["state"][3]["exp_avg"].to_local().tolist(),
    average,
    written,
)
TOGETHER = (
    lambda net, _: weight(net).full_tensor().tolist(),
    lambda net, _: torch.linalg.vector_norm(weight(net)).full_tensor().item(),
    in_evaluation,
    unsharded,
)


def readers_wait():
    # One rank reads, and the other goes on.
    looks = [look if dist.get_rank() == nth % 2 else nothing for nth, look in enumerate(LOCAL)]
    looks += TOGETHER
    assert_equal(run(deep, "module", looks), run(deep, "step", looks))


def kept_tensors_wait():
    """Those that were taken before the step: the local tensor itself waits, a view is exposed."""
    for keep in (
        lambda net: weight(net)._local_tensor,
        lambda net: weight(net)._local_tensor[:1],
        lambda net: net.state_dict()["layers.1.0.weight"],
    ):
        found = []
        for gate in ("module", "step"):
            net, optimizer, _ = started(deep, gate)
            with torch.no_grad():
                kept = keep(net)
            backward(net, 1)
            optimizer.step()
            found.append((kept.to_local() if isinstance(kept, DTensor) else kept).tolist())
            optimizer.synchronize()
        assert found[0] == found[1], keep


def tensors_that_are_placed_wait():
    assert_equal(run(Placed, "module"), run(Placed, "step"))


def the_tests_would_notice():
    protection = getattr(*protection_of_writes())
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(
            *protection_of_writes(), lambda *args: protection(*args)._replace(classes=[])
        )
        for make in MODELS.values():
            assert run(make, "module")[0] != run(make, "step")[0]


# ---- ranks that are late, are interrupted, or fail ----


class InterruptedOnce(LateEngine):
    """Ctrl-C lands in the first wait."""

    has_raised = False

    def wait(self, *args, **keywords):
        if not self.has_raised:
            self.has_raised = True
            raise KeyboardInterrupt
        return self._waiting("wait", self.inner.wait, *args, **keywords)


def late_on_one_rank():
    """One rank's step is late, and Ctrl-C lands in its wait."""

    def train(gate):
        net, optimizer, _ = started(deep, gate)
        optimizer.synchronize()
        found = []
        if gate == "module":
            make_in_time(optimizer)
            if dist.get_rank():
                late = make_late(optimizer, InterruptedOnce)
        for step in range(1, STEPS + 1):
            found.append(backward(net, step))
            optimizer.step()
            optimizer.zero_grad()
            if step == 1 and gate == "module" and dist.get_rank():
                with pytest.raises(KeyboardInterrupt):
                    weight(net).to_local()
                assert late.is_late
            found.append(weight(net).full_tensor().tolist())
        optimizer.synchronize()
        return found, [bits(param.detach().to_local()) for param in net.parameters()]

    assert_equal(train("module"), train("step"))


def interrupted_before_a_step():
    """Ctrl-C lands where it is said which shards are to wait: none does, and they step again."""
    found = []
    for is_interrupted in (False, True):
        net, optimizer, _ = started(deep, "module")
        backward(net, 1)
        if is_interrupted:
            protection = getattr(*protection_of_writes())

            def interrupted(*args, protection=protection):
                protection(*args)
                raise KeyboardInterrupt

            with pytest.MonkeyPatch.context() as patched:
                patched.setattr(*protection_of_writes(), interrupted)
                with pytest.raises(KeyboardInterrupt):
                    optimizer.step()
            for param in net.parameters():
                param.to_local()
            assert not is_any_under_way(optimizer)
            assert all(type(param) is DTensor for param in net.parameters())
        optimizer.step()
        optimizer.synchronize()
        found.append([bits(param.detach().to_local()) for param in net.parameters()])
    for other in found[1:]:
        assert all(map(torch.equal, found[0], other))


class Failing(LateEngine):
    """Its step fails in the background."""

    def _waiting(self, *args, **keywords):
        if self.is_late:
            raise OSError("the step has failed here")
        return super()._waiting(*args, **keywords)


def fails_on_one_rank():
    """The rank whose step has failed raises, and ends; the other is told by its collective."""
    net, optimizer, _ = started(deep, "module")
    optimizer.synchronize()
    if dist.get_rank():
        make_late(optimizer, Failing)
    backward(net, 1)
    optimizer.step()
    if dist.get_rank():
        for look in (weight(net).to_local, lambda: backward(net, 2)):
            with pytest.raises(OSError, match="failed here"):
                look()
        os._exit(9)
    with pytest.raises(RuntimeError):
        backward(net, 2)
    return True
