"""What runs on ranks of FSDP2 whose shards are in host memory (`CPUOffloadPolicy`).

The shards are stepped where they are, in the background. What is trained is compared with shards
that stay where FSDP2 computes.
"""

import contextlib
import copy
import gc
import weakref

import insides
import pytest
import stepwell
import torch
import torch.distributed as dist
from fsdp_late_programs import LOCAL, MIXED, TOGETHER, deep, nothing
from insides import background_of, forwards_wait, make_late, twins_of
from optim_cases import bits
from stepwell._sharding import local
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor

STEPS = 4


def offloaded(**options):
    # Pinned memory needs an accelerator.
    return deep(offload_policy=CPUOffloadPolicy(pin_memory=False), **options)


MODELS = {
    "plain": {},
    "reshard_after_forward=False": {"reshard_after_forward": False},
    "prefetch": {"prefetch": True},
    "mixed precision": {"mp_policy": MIXED},
}


def backward(net, step):
    weight = next(net.parameters())
    x = torch.linspace(-1, 1, 20).view(4, 5) + 0.1 * step + 0.5 * dist.get_rank()
    loss = net(x.to(weight.dtype)).square().mean()
    loss.backward()
    return loss.item()


class Run:
    """A model in training, and its optimizer."""

    def __init__(self, make, dtype=torch.float32, **options):
        self.net = make().to(dtype)
        options = {"lr": 0.1, "clip_norm": 0.05, "threads": 1, **options}
        self.optimizer = stepwell.OffloadAdamW(self.net, **options)
        self.seen = []

    def train(self, steps=STEPS, first=0, backwards=1, set_to_none=True):
        for step in range(first, first + steps):
            for nth in range(backwards):
                self.seen.append(backward(self.net, step + 10 * nth))
            self.optimizer.step()
            self.optimizer.zero_grad(set_to_none=set_to_none)
            self.seen.append(self.optimizer.grad_norm)
        return self

    def results(self):
        states = self.optimizer.state_dict()["state"].values()
        tensors = [*self.net.parameters()]
        tensors += [value for state in states for value in state.values()]
        return self.seen, [bits(local(each.detach())).tolist() for each in tensors]


def is_in_place(optimizer):
    """Whether no weight and no gradient has a copy in host memory."""
    return twins_of(optimizer).total_nbytes == 0


def trains_as_with_shards_elsewhere():
    for options in MODELS.values():
        run = Run(lambda options=options: offloaded(**options)).train()
        assert run.results() == Run(lambda options=options: deep(**options)).train().results()
        assert is_in_place(run.optimizer)
        assert forwards_wait(run.optimizer)


def dtypes_and_codecs():
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        for options in ({}, {"moments": "q8", "clip_norm": None}, {"accumulation_steps": 2}):
            backwards = options.get("accumulation_steps", 1)
            told = {"dtype": dtype, **options}
            found = [Run(make, **told).train(backwards=backwards) for make in (offloaded, deep)]
            assert found[0].results() == found[1].results(), told
            assert is_in_place(found[0].optimizer)


# ---- what waits, and for what ----


def late_run(make=offloaded, **options):
    """A model after its first step, whose next steps begin when something waits for them."""
    run = Run(make, **options).train(1)
    return run, make_late(run.optimizer)


def steps_go_on_behind():
    """`step()` returns before a shard is stepped, and each gather waits for its own."""
    for options in MODELS.values():
        run, late = late_run(lambda options=options: offloaded(**options))
        for step in range(1, STEPS):
            run.seen.append(backward(run.net, step))
            run.optimizer.step()
            run.optimizer.zero_grad()
            run.seen.append(run.optimizer.grad_norm)
            assert late.is_late
        assert run.results() == Run(lambda options=options: deep(**options)).train().results()


def own_shards_only():
    run, late = late_run()
    backward(run.net, 1)
    run.optimizer.step()
    run.net.layers[0].unshard()
    names = [name for name, _ in run.net.named_parameters()]
    waited = {names[each[1]] for each in late.waits if each[0] == "wait" and each[1:]}
    assert waited == {f"layers.0.{name}" for name in ("0.weight", "0.bias", "1.scale")}
    run.net.layers[0].reshard()
    run.optimizer.synchronize()


def readers_wait():
    looks = [look if dist.get_rank() == nth % 2 else nothing for nth, look in enumerate(LOCAL)]
    looks += TOGETHER
    found = []
    for is_late in (True, False):
        run, late = late_run() if is_late else (Run(deep).train(1), None)
        for step, look in enumerate(looks, 1):
            backward(run.net, step)
            run.optimizer.step()
            run.optimizer.zero_grad()
            run.seen.append(look(run.net, run.optimizer))
            assert late is None or late.is_late == (look is nothing), step
        found.append(run.results())
    assert found[0] == found[1]


def gradients_wait():
    """A gradient is read in the background: what would write it waits, and so does a view."""

    def zeroed(run):
        run.optimizer.zero_grad(set_to_none=False)

    def accumulated(run):
        backward(run.net, 100)

    def scaled(run):
        for param in run.net.parameters():
            param.grad.mul_(0.5)

    def scaled_in_a_list(run):
        torch._foreach_mul_([param.grad for param in run.net.parameters()], 0.5)

    def scaled_locally(run):
        for param in run.net.parameters():
            param.grad._local_tensor.mul_(0.5)

    def scaled_by_a_view(run):
        for view in run.views:
            view.mul_(0.5)

    for write in (zeroed, accumulated, scaled, scaled_in_a_list, scaled_locally, scaled_by_a_view):
        found = []
        for is_late in (True, False):
            run, late = late_run() if is_late else (Run(deep).train(1), None)
            backward(run.net, 1)
            run.views = None
            if write is scaled_by_a_view:
                run.views = [param.grad.to_local()[:1] for param in run.net.parameters()]
            run.optimizer.step()
            # Nothing tells of a write to a view: the step has waited.
            assert late is None or late.is_late == (run.views is None), write
            write(run)
            assert late is None or not late.is_late, write
            run.views = None
            run.optimizer.zero_grad()
            run.train(2, first=2)
            found.append(run.results())
        assert found[0] == found[1], write


def gradients_that_were_read_are_freed():
    """Before the next backward makes others."""
    run = Run(offloaded).train(2)
    backward(run.net, 2)
    storages = [local(param.grad).untyped_storage() for param in run.net.parameters()]
    known = [weakref.ref(each) for each in storages]
    del storages
    run.optimizer.step()
    run.optimizer.zero_grad()
    gc.collect()
    assert any(each() is not None for each in known)
    run.net(torch.ones(2, 5))
    assert not any(each() is not None for each in known)


# ---- what people do between steps ----


def scaled(net):
    with torch.no_grad():
        for param in net.parameters():
            param.mul_(0.9)


def written_behind_autograd(net):
    with torch.no_grad():
        for param in net.parameters():
            param._local_tensor.data.mul_(0.9)


def clamped(net):
    with torch.no_grad():
        for param in net.parameters():
            param.clamp_(-0.1, 0.1)


def loaded(net):
    net.load_state_dict({name: value * 0.5 for name, value in net.state_dict().items()})


def frozen(net):
    net.layers[1].requires_grad_(False)


def thawed(net):
    net.requires_grad_(True)


def what_is_done_between_steps_counts():
    for edits in ([scaled], [written_behind_autograd], [loaded], [clamped], [frozen, thawed]):
        for dtype in (torch.float32, torch.bfloat16):
            if edits == [clamped] and dtype is torch.bfloat16:
                # Trailing bits of a whole chunk are dropped, as in `AdamW`.
                continue
            found = []
            for make in (offloaded, deep):
                run = Run(make, dtype=dtype).train(2)
                for nth, edit in enumerate(edits):
                    edit(run.net)
                    run.train(2, first=2 + 2 * nth)
                found.append(run.results())
            assert found[0] == found[1], (edits, dtype)


def evaluates():
    found = []
    for make in (offloaded, deep):
        run = Run(make)
        for step in range(3):
            run.train(1, first=step)
            run.net.eval()
            with torch.no_grad():
                run.seen.append(run.net(torch.ones(2, 5)).tolist())
            run.net.train()
        found.append(run.results())
    assert found[0] == found[1]


def state_dicts_go_on_elsewhere():
    for makes in ((offloaded, deep), (deep, offloaded)):
        first = Run(makes[0], dtype=torch.bfloat16).train(2)
        saved = copy.deepcopy((first.net.state_dict(), first.optimizer.state_dict()))
        first.seen = []
        first.train(2, first=2)
        second = Run(makes[1], dtype=torch.bfloat16)
        second.net.load_state_dict(saved[0])
        second.optimizer.load_state_dict(saved[1])
        second.train(2, first=2)
        assert first.results() == second.results()


def gradients_that_are_not_finite():
    for nonfinite in ("skip", "raise", "propagate"):
        found = []
        for make in (offloaded, deep):
            run = Run(make, nonfinite=nonfinite).train(1)
            backward(run.net, 1)
            if dist.get_rank() == 0:
                run.net.layers[1][0].weight.grad._local_tensor[0, 0] = torch.inf
            told = pytest.raises(ValueError, match="is `inf`")
            with told if nonfinite == "raise" else contextlib.nullcontext():
                run.optimizer.step()
            run.optimizer.zero_grad()
            assert run.optimizer.skipped_steps == (nonfinite == "skip")
            run.train(1, first=2)
            run.seen = [repr(each) for each in run.seen]
            found.append(run.results())
        assert found[0] == found[1], nonfinite


# ---- what is refused, and what goes otherwise ----


def deferred_and_on_volumes(folder):
    """Shards have copies, and results are the same."""
    for name in ("deferred", "commit", "none"):
        found = []
        for make in (offloaded, deep):
            options = {"deferred": stepwell.Deferred(fraction=0)}
            if name != "deferred":
                drive = folder / f"{name} {make.__name__}"
                drive.mkdir(exist_ok=True)
                options = {"tier": stepwell.Volume([drive], durability=name)}
            run = Run(make, **options).train()
            assert not is_in_place(run.optimizer)
            found.append(run.results())
        assert found[0] == found[1], name


def what_does_not_go_with_it_is_refused():
    with pytest.raises(ValueError, match=r"is a DTensor, whose gradients are not summed"):
        Run(offloaded, accumulate="host")
    with pytest.raises(ValueError, match=r"`weights` is `host`"):
        Run(offloaded, weights="host")


def parameters_without_their_model():
    """No forward is known to wait: `step()` does."""
    net = offloaded()
    optimizer = stepwell.OffloadAdamW(net.parameters(), lr=0.1, clip_norm=0.05)
    seen = []
    for step in range(STEPS):
        seen.append(backward(net, step))
        optimizer.step()
        optimizer.zero_grad()
        seen.append(optimizer.grad_norm)
        assert not background_of(optimizer).opened().busy
    assert seen == Run(deep).train().seen
    assert all(type(param) is DTensor for param in net.parameters())
    assert insides.gate_of(optimizer) is None


# ---- where the ranks have GPUs, on these ----


def on_devices():
    """One group without gloo on GPUs, pinned shards, and copies of them that are under way."""
    device = torch.get_default_device().type
    backend = "nccl" if device == "cuda" else "gloo"
    mesh = DeviceMesh.from_group(dist.new_group(backend=backend), device)
    found = []
    for is_offloaded in (True, False):
        torch.manual_seed(0)
        with torch.device("cpu"):
            # The same numbers on all devices.
            layers = [torch.nn.Linear(512, 512) for _ in range(6)]
            net = torch.nn.Sequential(*layers).bfloat16()
            inputs = torch.randn(6, 2, 64, 512).bfloat16()
        net.to(device)
        policy = CPUOffloadPolicy(pin_memory=device == "cuda")
        options = {"offload_policy": policy} if is_offloaded else {}
        for layer in net:
            fully_shard(layer, mesh=mesh, **options)
        fully_shard(net, mesh=mesh, **options)
        # Devices round norms differently.
        optimizer = stepwell.OffloadAdamW(net, lr=1e-2, clip_norm=1e6)
        norms = []
        for x in inputs.to(device):
            net(x[0] + dist.get_rank()).square().mean().backward()
            with torch.no_grad():
                net(x[1])
            optimizer.step()
            optimizer.zero_grad()
            norms.append(optimizer.grad_norm)
        assert is_in_place(optimizer) == is_offloaded
        assert forwards_wait(optimizer)
        found.append((norms, [bits(local(param.detach()).cpu()) for param in net.parameters()]))
    assert found[0][0] == pytest.approx(found[1][0], rel=1e-5)
    assert all(map(torch.equal, found[0][1], found[1][1]))
