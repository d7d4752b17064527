"""Gradients that are copied in the backward: which, when and behind which stream."""

import math
import threading
import weakref

import pytest
import stepwell
import torch
from offload_cases import assert_equal, loss_of, pair, train
from stepwell import _core
from stepwell.offload import collector, engine, gradients
from stepwell.offload.checksums import sums_of
from stepwell.offload.gradients import Gradients, may_change_after_backward
from torch.utils import checkpoint as checkpointing

pytestmark = pytest.mark.usefixtures("every_gradient_is_a_batch")

SECONDS_MAX = 60


# ---- what is copied, and when ----


def of_bytes(count):
    return torch.zeros(count, dtype=torch.uint8)


def taken(copies, *grads):
    """What `add` has copied for gradients: (name, bytes) of each, or (name, bytes, stream)."""
    return [
        "".join(name for name, _ in copies.add(name, of_bytes(count), *stream or (0,)))
        for name, count, *stream in grads
    ]


def test_a_batch_is_copied_once_it_is_full(monkeypatch):
    """All but the latest; one that comes again counts once."""
    monkeypatch.setattr(gradients, "BATCH_BYTES", 32)
    copies = Gradients(1)
    assert taken(copies, ("a", 16), ("b", 15), ("c", 1), ("d", 31)) == ["", "", "", "abc"]
    assert taken(copies, ("d", 31), ("e", 1), ("f", 31)) == ["", "", "de"]
    copies.reset()
    assert taken(copies, ("g", 31), ("h", 1), ("i", 31)) == ["", "", "gh"]


def test_a_batch_is_of_one_stream(monkeypatch):
    monkeypatch.setattr(gradients, "BATCH_BYTES", 32)
    copies = Gradients(1)
    grads = [("a", 31, 0), ("b", 31, 1), ("c", 1, 1), ("d", 1, 1)]
    assert taken(copies, *grads) == ["", "", "", "bc"]


def test_the_last_backward_is_known_where_it_is_said():
    copies = Gradients(2)
    assert [copies.count(name) for name in "aabab"] == [False, True, False, True, True]
    with copies.no_sync():
        assert not copies.count("a")
    assert copies.count("a")
    copies.reset()
    assert [copies.count("a"), copies.count("a")] == [False, True]
    copies = Gradients(None)
    assert not copies.count("a")
    copies.knows_last = True
    assert copies.count("b")


ENGINE = _core.OffloadEngine("cpu", [1], threads=1)


def all_checksums(grads):
    return sums_of(ENGINE, grads, 0)


def mark_copied(copies, batch, checksums=all_checksums):
    copies.mark_copied(batch.items(), checksums(list(batch.values())), checksums)


def test_a_copy_is_of_one_tensor_at_one_version():
    copies, grad, other = Gradients(1), torch.ones(3), torch.ones(3)
    assert not copies.is_any_taken
    copies.add("waits", grad, 0)
    assert copies.is_any_taken and not copies.is_any_copied
    copies.reset()
    mark_copied(copies, {"copied": grad})
    assert copies.is_any_taken and copies.is_any_copied
    copies.add("waits", grad, 0)
    for name in ("copied", "waits"):
        assert not copies.is_replaced(name, grad) and copies.is_replaced(name, other)
    assert copies.is_copied("copied", grad) and not copies.is_outdated("copied", grad)
    assert not copies.is_copied("copied", other) and copies.is_outdated("copied", other)
    for name in ("waits", "new"):
        assert not copies.is_copied(name, grad) and not copies.is_outdated(name, grad)
    assert not copies.is_replaced("new", grad)
    grad.add_(1)
    assert not copies.is_copied("copied", grad) and copies.is_outdated("copied", grad)
    assert not copies.is_replaced("copied", grad)
    copies.reset()
    assert not copies.is_any_taken and not copies.is_replaced("copied", other)


def test_copies_that_are_forgotten_hold_no_engine():
    def checksums(grads):
        return all_checksums(grads)

    copies, freed = Gradients(1), weakref.ref(checksums)
    mark_copied(copies, {"a": torch.ones(3)}, checksums)
    del checksums
    assert freed() is not None
    copies.reset()
    assert freed() is None


def elsewhere(data):
    """The same values, in memory that begins amid a word."""
    return torch.cat([data.new_zeros(1), data.flatten()])[1:].view(data.shape)


def as_columns(data):
    """Other values of the same memory, in the same shape."""
    return data.as_strided(data.shape, (1, data.shape[0]))


@pytest.mark.parametrize("moved", [elsewhere, as_columns])
def test_a_copy_is_of_memory_in_one_place(moved):
    copies, grad, kept = Gradients(1), torch.arange(15.0).view(3, 5), torch.ones(3)
    mark_copied(copies, {"a": grad, "b": kept})
    assert copies.read_with(torch.tensor([2.5])) == [2.5]
    assert copies.is_copied("a", grad)
    grad.data = moved(grad.data)
    assert copies.read_with(torch.tensor([3.5])) == [3.5]
    assert not copies.is_copied("a", grad) and copies.is_outdated("a", grad)
    assert copies.is_copied("b", kept)


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
            copies, other = optimizer._collector.copies, torch.empty(0)
            taken |= {
                name for name, param in net.named_parameters() if copies.is_replaced(param, other)
            }
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
    monkeypatch.setattr(collector, "may_change_after_backward", lambda: True)
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
    weight, copies = net[0].weight, optimizer._collector.copies
    weight.data = move(weight.data)
    (weight.sum() * 2).backward()
    assert weight.grad.dtype == weight.dtype
    # With the next gradient it is its turn.
    net[0].bias.sum().backward()
    assert weight not in copies._waiting
    assert not copies.is_any_copied
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

    monkeypatch.setattr(collector, "current_stream", stream)
    add, take, taken = optimizer._collector.copies.add, optimizer._engine.take, []

    def noted_add(param, grad, stream):
        made[param] = stream
        return add(param, grad, stream)

    def noted_take(params, grads):
        taken.extend((made[param], current[0]) for param in params)
        take(params, grads)

    monkeypatch.setattr(optimizer._collector.copies, "add", noted_add)
    monkeypatch.setattr(optimizer._engine, "take", noted_take)
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
