"""Gradients: which are copied in the backward, and when; what changes, and what is dropped."""

import pytest
import stepwell
import torch
from insides import background_of
from offload_cases import assert_equal, loss_of, pair, small, train
from stepwell.store import engine, gradients
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils import checkpoint as checkpointing

pytestmark = pytest.mark.usefixtures("every_gradient_is_a_batch")

# ---- what is copied, and when ----


class Copies:
    """Parameters, whose backwards are one by one, and what the engine takes in each."""

    def __init__(self, monkeypatch, sizes, **options):
        self.params = {
            name: torch.nn.Parameter(torch.zeros(size, dtype=torch.bfloat16))
            for name, size in sizes.items()
        }
        self.optimizer = stepwell.OffloadAdamW(list(self.params.values()), **options)
        self._taken = []
        names = {id(param): name for name, param in self.params.items()}
        core = background_of(self.optimizer).opened()
        take = core.take

        def noted(params, grads):
            self._taken += [names[id(param)] for param in params]
            take(params, grads)

        monkeypatch.setattr(core, "take", noted)

    def backward(self, name):
        """The names of those that were copied in it."""
        self._taken.clear()
        self.params[name].sum().backward()
        return "".join(self._taken)

    def backwards(self, names):
        return [self.backward(name) for name in names]


def test_a_batch_is_copied_once_it_is_full(monkeypatch):
    """All but the latest; one that comes again counts once."""
    monkeypatch.setattr(gradients, "BATCH_BYTES", 64)
    sizes = {"a": 16, "b": 15, "c": 1, "d": 31, "e": 1, "f": 31, "g": 31, "h": 1, "i": 31}
    copies = Copies(monkeypatch, sizes, accumulation_steps=1)
    assert copies.backwards("abcd") == ["", "", "", "abc"]
    assert copies.backwards("def") == ["", "", "de"]
    copies.optimizer.zero_grad()
    assert copies.backwards("ghi") == ["", "", "gh"]


def test_a_batch_is_of_one_stream(monkeypatch):
    monkeypatch.setattr(gradients, "BATCH_BYTES", 64)
    sizes = {"a": 31, "b": 31, "c": 1, "d": 1}
    copies = Copies(monkeypatch, sizes, accumulation_steps=1)
    streams = iter([0, 1, 1, 1])
    monkeypatch.setattr(gradients, "current_stream", lambda _: next(streams))
    assert copies.backwards("abcd") == ["", "", "", "bc"]


def test_the_last_backward_is_known_where_it_is_said(monkeypatch):
    # Each gradient is copied with the next last one.
    copies = Copies(monkeypatch, {"a": 3, "b": 3}, accumulation_steps=2)
    assert copies.backwards("aabab") == ["", "", "", "a", "a"]
    with copies.optimizer.no_sync():
        assert copies.backward("a") == ""
    assert copies.backward("a") == "b"
    copies.optimizer.zero_grad()
    assert copies.backwards("aabb") == ["", "", "", "a"]
    copies = Copies(monkeypatch, {"a": 3, "b": 3})
    assert copies.backwards("ab") == ["", ""]
    with copies.optimizer.no_sync():
        assert copies.backward("a") == ""
    assert copies.backwards("ab") == ["", "a"]


@pytest.mark.parametrize("accumulate", ["device", "host"])
def test_a_lazy_zero_is_stepped_as_zero(accumulate):
    ours, theirs = (torch.nn.Parameter(torch.ones(4, 4)) for _ in range(2))
    ours.grad, theirs.grad = torch._efficientzerotensor((4, 4)), torch.zeros(4, 4)
    stepwell.OffloadAdamW([ours], accumulate=accumulate).step()
    stepwell.AdamW([theirs]).step()
    assert torch.equal(ours, theirs)


@pytest.mark.parametrize("checkpointed", [(1, 4), (0, 5)])
@pytest.mark.parametrize("use_reentrant", [False, True])
def test_copies_are_waited_for_when_the_whole_backward_has_ended(
    monkeypatch, use_reentrant, checkpointed
):
    """Not when one within it has, which reentrant checkpointing makes."""
    layers = torch.nn.ModuleList(torch.nn.Linear(3, 3) for _ in range(5))
    optimizer = stepwell.OffloadAdamW(layers, accumulation_steps=1)
    waits, ended = [], []
    monkeypatch.setattr(engine.Engine, "order_after_copies", lambda _: waits.append(len(ended)))
    for param in layers.parameters():
        param.register_post_accumulate_grad_hook(lambda _: ended.append(1))
    for _ in range(2):
        ended.clear()
        hidden = torch.ones(2, 3, requires_grad=True)
        for nth, layer in enumerate(layers):
            if nth in range(*checkpointed):
                hidden = checkpointing.checkpoint(layer, hidden, use_reentrant=use_reentrant)
            else:
                hidden = layer(hidden)
        hidden.sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    assert waits == [10, 10]


# ---- what a program writes or frees behind the backward is stepped as it is ----


def _replace_data(grad):
    grad.data = grad.data * 0.1


EDITS = {
    "data.mul_": lambda grad: grad.data.mul_(1e-3),
    "data.zero_": lambda grad: grad.data.zero_(),
    "numpy": lambda grad: grad.numpy().fill(0.5),
    "data =": _replace_data,
    "mul_": lambda grad: grad.mul_(1e-3),
    "set_": lambda grad: grad.set_(grad.data * 0.1),
}


@pytest.mark.parametrize("which", ["all", "one"])
@pytest.mark.parametrize("edit", EDITS.values(), ids=EDITS.keys())
def test_gradients_changed_after_their_copy_cross_again(edit, which, caplog):
    ours, theirs = pair(accumulation_steps=1)
    for net, optimizer in (ours, theirs):
        for step in range(3):
            optimizer.zero_grad()
            loss_of(net, step).backward()
            for param in list(net.parameters())[:: 1 if which == "all" else 4]:
                edit(param.grad)
            optimizer.step()
    assert_equal(ours, theirs)
    assert caplog.text.count("cross the bus again") == 1
    assert ours[1].grad_norm == pytest.approx(
        torch.nn.utils.get_total_norm([p.grad for p in theirs[0].parameters()]).item()
    )


def test_a_gradient_may_be_written_while_it_would_be_copied(monkeypatch):
    """Its copy has ended when the backward has, or the device is ordered so."""
    monkeypatch.setattr(gradients, "BATCH_BYTES", 64 << 20)

    def train(**options):
        torch.manual_seed(0)
        params = [torch.nn.Parameter(torch.randn(1 << 24) * 0.01) for _ in range(3)]
        optimizer = stepwell.OffloadAdamW(params, lr=1e-3, **options)
        for _ in range(2):
            (sum(each.square().sum() for each in params) + (params[0] * params[1]).sum()).backward()
            for each in params:
                # As for a log. Bits are the same.
                each.grad.data.mul_(2.0**-10)
                each.grad.data.mul_(2.0**10)
            optimizer.step()
            optimizer.zero_grad()
        optimizer.synchronize()
        return params

    for one, other in zip(train(accumulation_steps=1), train(), strict=True):
        assert torch.equal(one, other)


# ---- what no step takes: cleared, of a step that is not made, of a backward that fails ----


def clear_by_optimizer(net, optimizer):
    optimizer.zero_grad()


def clear_by_model(net, optimizer):
    net.zero_grad()


def set_to_zero(net, optimizer):
    optimizer.zero_grad(set_to_none=False)
    for param in net.parameters():
        # The next backward makes another.
        param.grad = None


@pytest.mark.parametrize("batch_bytes", [0, 64 << 20], ids=["copied", "waiting"])
@pytest.mark.parametrize("clear", [clear_by_optimizer, clear_by_model, set_to_zero])
def test_gradients_that_are_cleared_are_let_go(clear, batch_bytes, monkeypatch):
    """A program that skips batches holds no more than one set of gradients."""
    monkeypatch.setattr(gradients, "BATCH_BYTES", batch_bytes)
    ours, theirs = pair(accumulation_steps=1)
    net, optimizer = ours
    held = []
    for step in range(20):
        loss_of(net, step).backward()
        held += [StorageWeakRef(param.grad.untyped_storage()) for param in net.parameters()]
        clear(net, optimizer)
        held = [storage for storage in held if not storage.expired()]
        assert len(held) <= len(list(net.parameters())), step
        if clear is not clear_by_model:
            assert not held
    for each in (ours, theirs):
        train(*each, 2)
    assert_equal(ours, theirs)


@pytest.mark.parametrize("set_to_none", [True, False])
def test_a_cleared_backward_does_not_count(set_to_none, caplog):
    """Of three backwards the first is cleared: the last is the third, which crosses once."""
    ours, theirs = pair(accumulation_steps=2)
    for net, optimizer in (ours, theirs):
        loss_of(net, 0).backward()
        optimizer.zero_grad(set_to_none=set_to_none)
        loss_of(net, 1).backward()
        loss_of(net, 2).backward()
        optimizer.step()
    assert_equal(ours, theirs)
    assert "cross the bus again" not in caplog.text
    nbytes = sum(param.nbytes for param in ours[0].parameters())
    assert ours[1].timing["bytes_downloaded"] == nbytes


class Broken(torch.autograd.Function):
    """Passes on what it gets, and fails in the backward."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        raise RuntimeError("this backward fails")


def fail_half_way(net, step):
    """A backward that reaches the last layer, and no other."""
    *front, last = net
    x = torch.linspace(-1, 1, 28).view(4, 7) + step
    for layer in front:
        x = layer(x)
    with pytest.raises(RuntimeError, match="this backward fails"):
        last(Broken.apply(x)).square().sum().backward()


OPTIONS = [{}, {"accumulation_steps": 1}, {"accumulation_steps": 2}, {"accumulate": "host"}]
OPTION_IDS = ["untold", "told", "two", "host"]


@pytest.mark.parametrize("clears", [True, False], ids=["cleared", "not cleared"])
@pytest.mark.parametrize("options", OPTIONS, ids=OPTION_IDS)
def test_a_backward_that_fails_leaves_what_it_leaves_in_torch(options, clears):
    """Nothing but what is in `param.grad`, and that only until it is cleared."""
    ours = small()
    theirs = small()
    optimizer = stepwell.OffloadAdamW(ours, lr=1e-2, **options)
    reference = torch.optim.AdamW(theirs.parameters(), lr=1e-2)
    for net, each in ((ours, optimizer), (theirs, reference)):
        for step in range(4):
            each.zero_grad()
            if step % 2:
                fail_half_way(net, step)
                if clears:
                    each.zero_grad()
            loss_of(net, step).backward()
            loss_of(net, step + 1).backward()
            each.step()
    optimizer.synchronize()
    for param, expected in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(param, expected)
        for name in ("exp_avg", "exp_avg_sq"):
            torch.testing.assert_close(
                optimizer.state[param][name], reference.state[expected][name]
            )


def skip_by_nan(net, optimizer):
    loss_of(net, 7).backward()
    net[0].weight.grad[0, 0] = float("nan")
    optimizer.step()


def skip_by_found_inf(net, optimizer):
    loss_of(net, 7).backward()
    optimizer.found_inf = torch.ones(())
    optimizer.step()
    del optimizer.found_inf


def refuse(net, optimizer):
    loss_of(net, 7).backward()
    whole = net[0].weight.grad
    net[0].weight.grad = None
    net[0].bias.grad = torch.zeros_like(net[0].bias).to_sparse()
    with pytest.raises(ValueError, match="expected a dense tensor"):
        optimizer.step()
    net[0].weight.grad = whole


def fail_in_a_closure(net, optimizer):
    def closure():
        loss_of(net, 7).backward()
        raise RuntimeError("this closure fails")

    with pytest.raises(RuntimeError, match="this closure fails"):
        optimizer.step(closure)


@pytest.mark.parametrize("options", OPTIONS[:3], ids=OPTION_IDS[:3])
@pytest.mark.parametrize("abandon", [skip_by_nan, skip_by_found_inf, refuse, fail_in_a_closure])
def test_gradients_of_a_step_that_was_not_made_are_not_stepped(abandon, options):
    ours, theirs = pair(**options)
    for net, optimizer in (ours, theirs):
        for step in range(4):
            optimizer.zero_grad()
            if step % 2:
                abandon(net, optimizer)
                optimizer.zero_grad()
            loss_of(net, step).backward()
            if step == 3:
                # A parameter of the abandoned step that has no part in this one.
                net[3].weight.grad = None
            optimizer.step()
    assert_equal(ours, theirs)
