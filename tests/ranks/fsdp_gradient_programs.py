"""What runs on two ranks of FSDP2 whose gradients are copied to the host during the backward.

What is stepped is compared with what is stepped where they are copied in `step()`.
"""

import contextlib

import pytest
import stepwell
import torch
import torch.distributed as dist
from fsdp_late_programs import MODELS, STEPS, deep
from insides import background_of, forwards_wait
from optim_cases import bits
from stepwell.store import gradients
from torch.distributed.fsdp import CPUOffloadPolicy
from torch.distributed.tensor import DTensor


@contextlib.contextmanager
def every_group_is_a_batch():
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(gradients, "BATCH_BYTES", 0)
        yield


def backward(net, step):
    x = torch.linspace(-1, 1, 20).view(4, 5) + 0.1 * step + 0.5 * dist.get_rank()
    net(x).square().mean().backward()


class Run:
    """A model in training; the names of what was copied in the backwards of each step."""

    def __init__(self, make=deep, **options):
        self.net = make()
        options = {"lr": 0.1, "clip_norm": 0.05, "threads": 1, **options}
        self.optimizer = stepwell.OffloadAdamW(self.net, **options)
        self.names = {param: name for name, param in self.net.named_parameters()}
        self.copied, self.norms, self.bytes = [], [], []

    def train(self, num_steps=STEPS, backwards=backward, edit=None):
        for step in range(num_steps):
            with pytest.MonkeyPatch.context() as patched, every_group_is_a_batch():
                taken = self._note(patched)
                backwards(self.net, step)
                self.copied.append([self.names[param] for param in taken])
            if edit is not None:
                edit(self.net)
            self.optimizer.step()
            self.norms.append(self.optimizer.grad_norm)
            self.optimizer.synchronize()
            self.bytes.append(self.optimizer.timing["bytes_downloaded"])
            self.optimizer.zero_grad()
        return self

    def _note(self, patched):
        taken, engine = [], background_of(self.optimizer).engine
        if engine is not None:
            take = engine.take

            def noted(params, grads):
                taken.extend(params)
                take(params, grads)

            patched.setattr(engine, "take", noted)
        return taken

    def results(self):
        state = self.optimizer.state_dict()["state"].values()
        tensors = [*self.net.parameters(), *(each["exp_avg_sq"] for each in state)]
        found = [each.to_local() if isinstance(each, DTensor) else each for each in tensors]
        return self.norms, [bits(each.detach()).tolist() for each in found]


def nbytes(net):
    return sum(param.to_local().nbytes for param in net.parameters())


# The root's gradients, and those of the first layer, are reduced when autograd has ended, these
# last: the model's input needs no gradient.
FIRST_LAYER = [f"layers.0.{name}" for name in ("0.weight", "0.bias", "1.scale")]


def gradients_are_copied_in_the_backward():
    for name in ("reshard_after_forward=False", "mixed precision"):
        make = MODELS[name]
        early, late = Run(make, accumulation_steps=1).train(), Run(make).train()
        assert early.results() == late.results()
        # The first step makes the engine.
        rest = [name for name in early.names.values() if name not in FIRST_LAYER]
        assert [sorted(each) for each in early.copied] == [[], *[sorted(rest)] * (STEPS - 1)]
        assert late.copied == [[]] * STEPS
        # They cross once.
        assert early.bytes == late.bytes == [nbytes(early.net)] * STEPS
        assert forwards_wait(early.optimizer)


def twice(net, step):
    backward(net, 2 * step)
    backward(net, 2 * step + 1)


def reduced_once(net, step):
    net.set_requires_gradient_sync(False)
    backward(net, 2 * step)
    net.set_requires_gradient_sync(True)
    backward(net, 2 * step + 1)


def gradients_may_be_accumulated():
    for backwards, count in ((twice, 2), (reduced_once, 1)):
        early = Run(accumulation_steps=count).train(backwards=backwards)
        assert early.results() == Run().train(backwards=backwards).results()
        rest = [name for name in early.names.values() if name not in FIRST_LAYER]
        assert [sorted(each) for each in early.copied] == [[], *[sorted(rest)] * (STEPS - 1)]
        assert early.bytes == [nbytes(early.net)] * STEPS


def the_last_backward_may_be_told_by_no_sync():
    run = Run()

    def backwards(net, step):
        with run.optimizer.no_sync():
            backward(net, 2 * step)
        backward(net, 2 * step + 1)

    run.train(2, backwards=backwards)
    assert run.results() == Run().train(2, backwards=twice).results()
    assert [bool(each) for each in run.copied] == [False, True]
    assert run.bytes == [nbytes(run.net)] * 2


def changed(net):
    return [net.layers[1][0].weight, net.layers[2][1].scale]


def scaled(net):
    for param in changed(net):
        param.grad.mul_(0.5)


def scaled_behind_the_version(net):
    # On one rank, which alone copies again.
    if dist.get_rank():
        for param in changed(net):
            param.grad._local_tensor.data.mul_(0.5)


def replaced(net):
    for param in changed(net):
        param.grad = param.grad * 0.5


def other_local_tensor(net):
    for param in changed(net):
        before = param.grad._local_tensor
        param.grad._local_tensor = other = before * 0.5
        while other._version < before._version:
            torch.autograd.graph.increment_version(other)


def clipped(net):
    torch.nn.utils.clip_grad_norm_(net.parameters(), 1e-3)


def removed(net):
    for param in changed(net):
        param.grad = None


def gradients_that_are_changed_cross_again():
    for edit in (scaled, scaled_behind_the_version, replaced, other_local_tensor, clipped, removed):
        early, late = (Run(**told).train(2, edit=edit) for told in ({"accumulation_steps": 1}, {}))
        assert early.results() == late.results(), edit
        assert early.copied[1], edit
        if edit is scaled_behind_the_version:
            # Those alone.
            again = sum(param.to_local().nbytes for param in changed(early.net)) * dist.get_rank()
            assert early.bytes == [nbytes(early.net), nbytes(early.net) + again]


class Failing(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        raise ArithmeticError("the backward has failed here")


def a_backward_that_fails_leaves_nothing():
    """It fails on both ranks, in the first layer, when gradients of the others were copied."""

    def train(**options):
        run = Run(**options).train(2)
        with pytest.MonkeyPatch.context() as patched, every_group_is_a_batch():
            taken = run._note(patched)
            x = torch.ones(4, 5)
            hook = run.net.layers[0][0].register_forward_hook(lambda *args: Failing.apply(args[2]))
            loss = run.net(x).square().mean()
            hook.remove()
            with pytest.raises(ArithmeticError, match="failed here"):
                loss.backward()
        run.optimizer.zero_grad()
        names = [run.names[param] for param in taken]
        if not hasattr(run.net, "reset_iter_state"):
            # This FSDP2 does not go on behind it.
            return None, names
        run.net.reset_iter_state()
        return run.train(2).results(), names

    (early, taken), (late, none) = train(accumulation_steps=1), train()
    assert early == late
    assert any(name.startswith("layers.2") for name in taken)
    assert not none


def offloaded_gradients_are_left_to_the_step():
    """FSDP2 brings these to the host by itself, and they may be late."""
    policy = CPUOffloadPolicy(pin_memory=False)
    early = Run(lambda: deep(offload_policy=policy), accumulation_steps=1).train()
    assert early.copied == [[]] * STEPS
    assert early.results() == Run(lambda: deep(offload_policy=policy)).train().results()
