"""Gradients that are copied in the backward: which, when and behind which stream."""

import math
import threading
import weakref

import pytest
import stepwell
import torch
from offload_cases import assert_equal, loss_of, pair, train
from stepwell.store import engine, gradients
from stepwell.store.gradients import may_change_after_backward
from torch.utils import checkpoint as checkpointing

pytestmark = pytest.mark.usefixtures("every_gradient_is_a_batch")

SECONDS_MAX = 60


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
        core = self.optimizer._background.opened()
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

    def missing(self, name):
        param = self.params[name]
        return bool(self.optimizer._collector.missing([param], [param.grad]))


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


def test_a_copy_is_of_one_tensor_at_one_version(monkeypatch):
    copies = Copies(monkeypatch, {"copied": 3, "waits": 3, "new": 3}, accumulation_steps=1)
    collector, param = copies.optimizer._collector, copies.params["copied"]
    assert not collector.is_any_taken
    assert copies.backward("copied") == ""
    assert collector.is_any_taken and copies.missing("copied")
    assert copies.backward("waits") == "copied"
    assert not copies.missing("copied") and copies.missing("waits")
    assert collector.missing([param], [torch.ones_like(param)]) == [0]
    param.grad.add_(1)
    assert copies.missing("copied")
    copies.optimizer.zero_grad()
    assert not collector.is_any_taken


def test_a_step_leaves_nothing_taken(monkeypatch):
    copies = Copies(monkeypatch, {"a": 3, "b": 3}, accumulation_steps=1)
    assert copies.backwards("ab") == ["", "a"]
    copies.optimizer.step()
    assert copies.missing("a") and not copies.optimizer._collector.is_any_taken


def test_copies_that_are_forgotten_hold_no_engine():
    net, optimizer = pair(accumulation_steps=1)[0]
    train(net, optimizer, 1)
    loss_of(net, 1).backward()
    freed = weakref.ref(optimizer._background.engine)
    added = torch.nn.Parameter(torch.ones(3))
    optimizer.add_param_group({"params": [added]})
    assert freed() is None


def elsewhere(data):
    """The same values, in memory that begins amid a word."""
    return torch.cat([data.new_zeros(1), data.flatten()])[1:].view(data.shape)


def as_columns(data):
    """Other values of the same memory, in the same shape."""
    return data.as_strided(data.shape, (1, data.shape[0]))


@pytest.mark.parametrize("moved", [elsewhere, as_columns])
def test_a_copy_is_of_memory_in_one_place(moved, monkeypatch):
    copies = Copies(monkeypatch, {"a": (3, 5), "b": 3, "c": 3}, accumulation_steps=1)
    assert copies.backwards("abc") == ["", "a", "b"]
    read, grad = copies.optimizer._collector.read, copies.params["a"].grad
    assert read(torch.tensor(2.5), None) == (2.5, False)
    assert not copies.missing("a")
    grad.data = moved(grad.data)
    assert read(torch.tensor(3.5), torch.tensor(True)) == (3.5, True)
    assert copies.missing("a") and not copies.missing("b")


@pytest.mark.parametrize("world_size", [1, 2])
def test_other_ranks_may_change_a_gradient_after_the_backward(world_size, monkeypatch):
    assert not may_change_after_backward()
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: world_size)
    assert may_change_after_backward() == (world_size > 1)


def test_gradients_that_are_not_changed_cross_once():
    net, optimizer = pair(accumulation_steps=1)[0]
    for step in range(3):
        optimizer.zero_grad()
        loss_of(net, step).backward()
        optimizer.step()
    optimizer.synchronize()
    assert optimizer.timing["bytes_downloaded"] == sum(param.nbytes for param in net.parameters())


# ---- gradients that are not copied in the backward ----


def train_with(net, optimizer, prepare):
    """Steps with gradients that are there before the backward; what was taken in it, by name."""
    taken = set()
    for step in range(2):
        optimizer.zero_grad()
        prepare(net)
        loss_of(net, step).backward()
        if isinstance(optimizer, stepwell.OffloadAdamW):
            collector = optimizer._collector
            ids = {*collector._copied, *collector._waiting}
            taken |= {name for name, param in net.named_parameters() if id(param) in ids}
        optimizer.step()
    return taken


def set_columns(net):
    net[2].weight.grad = torch.zeros_like(net[2].weight.t()).contiguous().t()


@pytest.mark.filterwarnings("ignore:grad and param do not obey")
def test_a_gradient_that_is_not_in_one_run_is_left_to_the_step(caplog):
    ours, theirs = pair(accumulation_steps=1)
    names = {name for name, _ in ours[0].named_parameters()}
    assert train_with(*ours, set_columns) == names - {"2.weight"}
    train_with(*theirs, set_columns)
    assert_equal(ours, theirs)
    assert "cross the bus again" not in caplog.text


def test_a_sparse_gradient_is_refused_in_the_step():
    table = torch.nn.Embedding(5, 3, sparse=True)
    optimizer = stepwell.OffloadAdamW(table, accumulation_steps=1)
    table(torch.tensor([1, 2])).sum().backward()
    with pytest.raises(ValueError, match="expected a dense tensor"):
        optimizer.step()


def test_a_gradient_that_other_ranks_may_change_is_left_to_the_step(monkeypatch):
    ours, theirs = pair(accumulation_steps=1)
    monkeypatch.setattr(gradients, "may_change_after_backward", lambda: True)
    assert not train_with(*ours, lambda _: None)
    train_with(*theirs, lambda _: None)
    assert_equal(ours, theirs)


MOVES = {
    "dtype": (lambda data: data.bfloat16(), "is `torch.bfloat16`"),
    "shape": (lambda data: data[:3].clone(), r"expected `torch.float32` of `\(500, 7\)`"),
}


@pytest.mark.parametrize(("move", "message"), MOVES.values(), ids=MOVES.keys())
def test_a_backward_after_a_move_of_the_model_copies_nothing_of_it(move, message):
    """Its gradient may be smaller than what the engine would read."""
    net, optimizer = pair(accumulation_steps=1)[0]
    train(net, optimizer, 1)
    optimizer.zero_grad()
    optimizer.synchronize()
    weight, collector = net[0].weight, optimizer._collector
    weight.data = move(weight.data)
    (weight.sum() * 2).backward()
    assert weight.grad.dtype == weight.dtype
    # With the next gradient it is its turn.
    net[0].bias.sum().backward()
    assert id(weight) not in collector._waiting
    assert not collector._copied
    with pytest.raises(ValueError, match=message):
        optimizer.step()


@pytest.mark.parametrize("accumulate", ["device", "host"])
def test_a_lazy_zero_is_stepped_as_zero(accumulate):
    ours, theirs = (torch.nn.Parameter(torch.ones(4, 4)) for _ in range(2))
    ours.grad, theirs.grad = torch._efficientzerotensor((4, 4)), torch.zeros(4, 4)
    stepwell.OffloadAdamW([ours], accumulate=accumulate).step()
    stepwell.AdamW([theirs]).step()
    assert torch.equal(ours, theirs)


# ---- whole backwards, and several streams ----


@pytest.mark.parametrize("turns", [1, 2, 3, 8])
def test_gradients_are_copied_behind_the_stream_that_made_them(turns, monkeypatch):
    """A batch holds those of one stream, and is taken while that is the current one."""
    ours, theirs = pair(accumulation_steps=1)
    net, optimizer = ours
    train(net, optimizer, 1)
    train(*theirs, 1)
    # The hooks of autograd run in this order.
    made: dict[torch.Tensor, int] = {}
    current = [0]

    def stream(_):
        current[0] = len(made) // turns
        return current[0]

    monkeypatch.setattr(gradients, "current_stream", stream)
    take, taken = optimizer._background.engine.take, []
    for param in net.parameters():
        # Behind the optimizer's.
        param.register_post_accumulate_grad_hook(lambda each: made.update({each: current[0]}))

    def noted_take(params, grads):
        taken.extend((made[param], current[0]) for param in params)
        take(params, grads)

    monkeypatch.setattr(optimizer._background.engine, "take", noted_take)
    optimizer.zero_grad()
    loss_of(net, 1).backward()
    assert all(maker == behind for maker, behind in taken)
    count = len(made)
    # All but the last of each stream.
    assert len(taken) == count - -(-count // turns)
    optimizer.step()
    theirs[1].zero_grad()
    loss_of(theirs[0], 1).backward()
    theirs[1].step()
    monkeypatch.undo()
    assert_equal(ours, theirs)


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


def test_each_of_two_backwards_at_once_waits_for_its_copies(monkeypatch):
    params = [torch.nn.Parameter(torch.ones(4)) for _ in range(6)]
    optimizer = stepwell.OffloadAdamW(params, accumulation_steps=1)
    optimizer._background.opened()
    waits = []
    monkeypatch.setattr(
        engine.Engine,
        "order_after_copies",
        lambda _: waits.append(threading.current_thread().name),
    )
    are_copied, has_ended = threading.Event(), threading.Event()
    root = torch.ones(4, requires_grad=True) * 1.0

    def wait(_):
        # The gradient of the root is the last.
        are_copied.set()
        assert has_ended.wait(SECONDS_MAX)

    root.register_hook(wait)

    def first():
        math.prod(params[:3], start=root).sum().backward()

    def second():
        assert are_copied.wait(SECONDS_MAX)
        math.prod(params[3:], start=torch.ones(4)).sum().backward()
        has_ended.set()

    threads = [threading.Thread(target=each, name=each.__name__) for each in (first, second)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(SECONDS_MAX)
    assert sorted(waits) == ["first", "second"]
