"""Gradients that are copied early count only as they are when the step is made."""

import weakref

import pytest
import stepwell
import torch
from hypothesis import given
from hypothesis import strategies as st
from offload_cases import assert_equal, loss_of, pair, small, train
from optim_cases import DTYPES
from stepwell import _core
from stepwell.offload import collector, engine, gradients
from stepwell.offload.checksums import checksum, differences, sums_of
from stepwell.offload.gradients import Gradients, may_change_after_backward
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils import checkpoint as checkpointing


@pytest.fixture(autouse=True)
def _every_gradient_is_a_batch(monkeypatch):
    monkeypatch.setattr(gradients, "BATCH_BYTES", 0)


# ---- checksums ----


def is_different(before, after):
    return bool(differences([before], [after]).item())


SIZES = [1, 7, 4095, 4096, 4097, 12288, 100_003]


def words(dtype, count, offset=0):
    """Bits of all kinds, NaNs among them, that begin `offset` elements into their storage."""
    size = torch.finfo(dtype).bits // 8
    return torch.randint(0, 256, ((count + offset) * size,), dtype=torch.uint8).view(dtype)[offset:]


@pytest.mark.parametrize("offset", [0, 1, 3])
@pytest.mark.parametrize("count", SIZES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_equal_bits_have_equal_checksums(dtype, count, offset):
    tensor = words(dtype, count, offset)
    before = checksum(tensor)
    assert before.dtype == torch.int64
    assert before.nbytes <= 72 << 10
    assert not is_different(before, checksum(tensor))


CHANGES = {
    "scaled": lambda t: t.mul_(0.5),
    "negated": lambda t: t.neg_(),
    "reversed": lambda t: t.copy_(t.flip(0)),
    "zeroed": lambda t: t.zero_(),
    "the first": lambda t: t[0].mul_(1.5),
    "the last": lambda t: t[-1].mul_(1.5),
    "a small one": lambda t: t[len(t) // 2].copy_(1e-30),
    "a NaN": lambda t: t[len(t) // 3].copy_(float("nan")),
    "clamped": lambda t: t.clamp_(-1e-3, 1e-3),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES.keys())
@pytest.mark.parametrize("count", [7, 4096, 12288, 100_003])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_changes_are_seen(dtype, count, change):
    tensor = torch.randn(count).to(dtype)
    before = checksum(tensor)
    change(tensor)
    assert is_different(before, checksum(tensor))


@pytest.mark.parametrize("period", [1, 2, 4, 64, 1024])
def test_signs_of_patterns_are_seen(period):
    # As many positive as negative ones, all of one size.
    signs = torch.tensor([1.0, -1.0]).repeat_interleave(period)
    tensor = signs.repeat(1 << 16)[: 1 << 16]
    tensor[: len(tensor) // 3] *= 2
    before = checksum(tensor)
    tensor[::3].neg_()
    assert is_different(before, checksum(tensor))


@given(
    count=st.sampled_from(SIZES),
    offset=st.integers(0, 3),
    at=st.floats(0, 1, exclude_max=True),
    bit=st.integers(0, 31),
)
def test_a_single_bit_is_seen(count, offset, at, bit):
    tensor = torch.linspace(-1, 1, count + offset)[offset:]
    before = checksum(tensor)
    word = tensor.view(torch.int32)[int(at * count)]
    word.bitwise_xor_(torch.tensor((1 << bit) - (1 << 32 if bit == 31 else 0)).int())
    assert is_different(before, checksum(tensor))


def test_each_pair_is_told_apart():
    tensors = [torch.randn(count) for count in SIZES]
    before = [checksum(tensor) for tensor in tensors]
    for tensor in tensors[1::2]:
        tensor.neg_()
    found = differences(before, [checksum(tensor) for tensor in tensors]).tolist()
    assert found == [float(index % 2) for index in range(len(SIZES))]


def test_empty_tensors_never_differ():
    full, empty = torch.ones(3), torch.empty(0, 3)
    before = [checksum(empty), checksum(full), checksum(empty)]
    full.neg_()
    after = [checksum(empty), checksum(full), checksum(empty)]
    assert differences(before, after).tolist() == [0.0, 1.0, 0.0]
    assert differences(before[:1], after[:1]).tolist() == [0.0]


def test_memory_that_begins_amid_a_word():
    memory = bytearray(200_008)
    tensor = torch.frombuffer(memory, dtype=torch.bfloat16, offset=2)
    before = checksum(tensor)
    assert not is_different(before, checksum(tensor))
    tensor[50_000] = 1
    assert is_different(before, checksum(tensor))


@pytest.mark.parametrize("accumulate", ["device", "host"])
def test_a_lazy_zero_is_stepped_as_zero(accumulate):
    ours, theirs = (torch.nn.Parameter(torch.ones(4, 4)) for _ in range(2))
    ours.grad, theirs.grad = torch._efficientzerotensor((4, 4)), torch.zeros(4, 4)
    stepwell.OffloadAdamW([ours], accumulate=accumulate).step()
    stepwell.AdamW([theirs]).step()
    assert torch.equal(ours, theirs)


# ---- what is copied, and when ----


def of_bytes(count):
    return torch.zeros(count, dtype=torch.uint8)


def taken(copies, *grads):
    """What `add` has copied for gradients: (name, bytes) of each, or (name, bytes, stream)."""
    return [
        "".join(copies.add(name, of_bytes(count), *stream or (0,)))
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


def all_checksums(grads):
    return [checksum(grad) for grad in grads]


def mark_copied(copies, batch, checksums=all_checksums):
    copies.mark_copied(batch, checksums(list(batch.values())), checksums)


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
    assert copies.read_with(torch.tensor(2.5)) == 2.5
    assert copies.is_copied("a", grad)
    grad.data = moved(grad.data)
    assert copies.read_with(torch.tensor(3.5)) == 3.5
    assert not copies.is_copied("a", grad) and copies.is_outdated("a", grad)
    assert copies.is_copied("b", kept)


@pytest.mark.parametrize("world_size", [1, 2])
def test_other_ranks_may_change_a_gradient_after_the_backward(world_size, monkeypatch):
    assert not may_change_after_backward()
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: world_size)
    assert may_change_after_backward() == (world_size > 1)


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
    optimizer = stepwell.OffloadAdamW(table.parameters(), accumulation_steps=1)
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


# ---- edits between the backward and the step ----


def _replace_data(grad):
    grad.data = grad.data * 0.1


EDITS = {
    "data.mul_": lambda grad: grad.data.mul_(1e-3),
    "data.neg_": lambda grad: grad.data.neg_(),
    "data.clamp_": lambda grad: grad.data.clamp_(-1e-2, 1e-2),
    "data.zero_": lambda grad: grad.data.zero_(),
    "data.add_": lambda grad: grad.data.add_(1e-3),
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


def test_gradients_that_are_not_changed_cross_once():
    net, optimizer = pair(accumulation_steps=1)[0]
    for step in range(3):
        optimizer.zero_grad()
        loss_of(net, step).backward()
        optimizer.step()
    optimizer.synchronize()
    assert optimizer.timing["bytes_downloaded"] == sum(param.nbytes for param in net.parameters())


def test_changes_are_seen_without_the_engines_checksums(monkeypatch, caplog):
    """As where the driver cannot compile its kernel; that is said once."""

    def refuse(*_):
        raise OSError("no compiler")

    monkeypatch.setattr(engine, "sums_of", refuse)
    ours, theirs = pair(accumulation_steps=1)
    for net, optimizer in (ours, theirs):
        for step in range(3):
            optimizer.zero_grad()
            loss_of(net, step).backward()
            net[2].weight.grad.data.mul_(0.5)
            optimizer.step()
    assert_equal(ours, theirs)
    assert caplog.text.count("take longer than they might: no compiler") == 1


# ---- gradients that no step takes ----


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


def test_backwards_are_counted_from_the_last_step(caplog):
    """Also where gradients are not cleared, so that those of all steps are summed."""
    ours, theirs = pair(accumulation_steps=2)
    for net, optimizer in (ours, theirs):
        for step in range(6):
            loss_of(net, step).backward()
            if step % 2:
                optimizer.step()
    assert_equal(ours, theirs)
    assert "cross the bus again" not in caplog.text


def test_a_backward_counts_once_for_a_parameter_that_went_and_came_back():
    net, optimizer = pair(accumulation_steps=2)[0]
    first, params = net[0].weight, optimizer.param_groups[0]["params"]
    for members in (list(net.parameters())[1:], [*params[1:], first]):
        train(net, optimizer, 1)
        params[:] = members
    train(net, optimizer, 1)
    optimizer.zero_grad()
    loss_of(net, 1).backward()
    assert not optimizer._collector.copies.is_any_taken
    loss_of(net, 2).backward()
    assert optimizer._collector.copies.is_any_taken


@pytest.mark.parametrize("batch_bytes", [0, 64 << 20], ids=["copied", "waiting"])
def test_backwards_that_the_model_has_cleared_do_not_count(batch_bytes, monkeypatch, caplog):
    """Of four backwards two are cleared: the last is the fourth, which crosses once, and early."""
    monkeypatch.setattr(gradients, "BATCH_BYTES", batch_bytes)
    ours, theirs = pair(accumulation_steps=2)
    for net, optimizer in (ours, theirs):
        for step in range(4):
            loss_of(net, step).backward()
            if step == 1:
                net.zero_grad()
        if net is ours[0]:
            assert optimizer._collector.copies.is_any_taken
        optimizer.step()
    assert_equal(ours, theirs)
    assert "cross the bus again" not in caplog.text


def test_zero_grad_after_a_step_discards_nothing(monkeypatch):
    net, optimizer = pair(accumulation_steps=1)[0]
    train(net, optimizer, 1)
    discarded = []
    monkeypatch.setattr(optimizer._engine, "discard", lambda: discarded.append(None))
    for set_to_none in (True, False):
        optimizer.zero_grad(set_to_none=set_to_none)
        loss_of(net, 1).backward()
        optimizer.step()
    optimizer.zero_grad()
    assert not discarded


# ---- gradients of several streams ----


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


# ---- steps that are not made, backwards that fail ----


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
    optimizer = stepwell.OffloadAdamW(ours.parameters(), lr=1e-2, **options)
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


# ---- checksums by the engine ----


def expected_sums(tensor):
    """By Python's integers, as `Device::checksums` says."""
    words = tensor.view(-1).view(torch.uint8).view(torch.int64).tolist()
    sums = [0] * _core.CHECKSUM_SUMS
    for at, word in enumerate(words):
        product = word * (2 * at + 1) % 2**64
        sums[at // 256 % _core.CHECKSUM_SUMS] += product ^ (product >> 32)
    return [(each + 2**63) % 2**64 - 2**63 for each in sums]


@pytest.fixture(name="engine")
def _engine():
    device = "cuda:0" if torch.cuda.is_available() else "cpu"
    return _core.OffloadEngine(device, [1], threads=1)


def sums(engine, *tensors):
    stream = torch.cuda.current_stream().cuda_stream if torch.cuda.is_available() else 0
    return sums_of(engine, tensors, stream)


# A thread of the GPU's kernel adds four words at a time, 256 * 256 apart, and what is left singly.
FOUR_WORDS = 4 * 256 * 256 * 4


@pytest.mark.parametrize(
    "count",
    [
        4,
        1024,
        100_000,
        FOUR_WORDS * 3 // 4 + 1028,
        FOUR_WORDS - 4,
        FOUR_WORDS,
        FOUR_WORDS + 4,
        3 * FOUR_WORDS + 100_000,
    ],
)
def test_the_engine_sums_words_by_their_places(engine, count):
    device = "cuda" if torch.cuda.is_available() else "cpu"
    first = torch.randn(count).bfloat16()
    second = torch.randint(-(2**31), 2**31, (count // 2,)).int()
    second[0] = -1
    found = sums(engine, first.to(device), second.to(device))
    assert [each.tolist() for each in found] == [expected_sums(first), expected_sums(second)]


def test_many_tensors_have_their_own_sums(engine):
    """More than one launch of the GPU's kernel takes."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    tensors = [torch.randn(4 * (1 + 37 * at % 600)).bfloat16().to(device) for at in range(300)]
    found = sums(engine, *tensors)
    assert [each.tolist() for each in found] == [expected_sums(each.cpu()) for each in tensors]


@pytest.mark.parametrize(
    ("begin", "end"),
    [(0, 0), (0, 3), (1, 3), (1, 4), (1, 7), (2, 9), (3, 1 << 14), (0, 3_004_001), (1, 3_004_002)],
)
def test_bytes_beside_whole_words_are_kept(engine, begin, end):
    device = "cuda" if torch.cuda.is_available() else "cpu"
    memory = torch.arange(end + 1).to(torch.int16).to(device)
    tensor = memory[begin:end]
    (found,) = sums(engine, tensor)
    nbytes = tensor.cpu().view(torch.uint8)
    lead = min(2 * (-begin % 4), len(nbytes))
    tail = len(nbytes) - (len(nbytes) - lead) % 8
    expected = expected_sums(nbytes[lead:tail].clone()) + nbytes[:lead].tolist()
    assert found.tolist() == expected + nbytes[tail:].tolist()


def test_words_of_any_size_that_change_places_are_seen(engine):
    device = "cuda" if torch.cuda.is_available() else "cpu"
    tensor = torch.randn(1001, 3001, device=device)
    (before,) = sums(engine, tensor)
    flat = tensor.view(-1)
    flat[:4] = flat[[2, 3, 0, 1]]
    (after,) = sums(engine, tensor)
    assert is_different(before, after)


def test_changes_and_swaps_change_the_engines_sums(engine):
    device = "cuda" if torch.cuda.is_available() else "cpu"
    tensor = torch.randn(1 << 18, dtype=torch.float64, device=device)
    before, length = tensor.clone(), 1 << 16
    tensors = [
        before,
        -before,
        before.flip(0),
        torch.cat([before[length:], before[:length]]),
        before.nextafter(before.new_tensor(9.0)),
        before.index_fill(0, torch.tensor([77], device=device), 0.0),
    ]
    (expected, *others) = [each.tolist() for each in sums(engine, *tensors)]
    assert sums(engine, tensor)[0].tolist() == expected
    assert all(other != expected for other in others)


def test_memory_that_is_not_of_words_is_refused(engine):
    with pytest.raises(ValueError, match="expected whole words"):
        engine.checksums([8], [12], 0)
    with pytest.raises(ValueError, match="expected as many"):
        engine.checksums([8], [], 0)


def scaled_and_back(grad):
    """As for a log. Bits are the same."""
    grad.data.mul_(2.0**-10)
    grad.data.mul_(2.0**10)


def freed_and_back(grad):
    storage, kept = grad.untyped_storage(), grad.clone()
    nbytes = storage.nbytes()
    storage.resize_(0)
    storage.resize_(nbytes)
    grad.data.copy_(kept)


@pytest.mark.parametrize("edit", [scaled_and_back, freed_and_back])
def test_a_gradient_may_be_written_while_it_would_be_copied(monkeypatch, edit):
    """Its copy has ended when the backward has, or the device is ordered so."""
    monkeypatch.setattr(gradients, "BATCH_BYTES", 64 << 20)

    def train(**options):
        torch.manual_seed(0)
        params = [torch.nn.Parameter(torch.randn(1 << 24) * 0.01) for _ in range(3)]
        optimizer = stepwell.OffloadAdamW(params, lr=1e-3, **options)
        for _ in range(2):
            (sum(each.square().sum() for each in params) + (params[0] * params[1]).sum()).backward()
            for each in params:
                edit(each.grad)
            optimizer.step()
            optimizer.zero_grad()
        optimizer.synchronize()
        return params

    for one, other in zip(train(accumulation_steps=1), train(), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_copies_are_waited_for_when_the_whole_backward_has_ended(monkeypatch, use_reentrant):
    """Not when one within it has, which reentrant checkpointing makes."""
    layers = torch.nn.ModuleList(torch.nn.Linear(3, 3) for _ in range(5))
    optimizer = stepwell.OffloadAdamW(layers.parameters(), accumulation_steps=1)
    waits, ended = [], []
    monkeypatch.setattr(engine.Engine, "order_after_copies", lambda _: waits.append(len(ended)))
    for param in layers.parameters():
        param.register_post_accumulate_grad_hook(lambda _: ended.append(1))
    for _ in range(2):
        ended.clear()
        hidden = layers[0](torch.ones(2, 3))
        for layer in layers[1:4]:
            hidden = checkpointing.checkpoint(layer, hidden, use_reentrant=use_reentrant)
        layers[4](hidden).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    assert waits == [10, 10]


@pytest.mark.parametrize("early", [{}, {"accumulation_steps": 1}])
@pytest.mark.parametrize("left", [0.0, 0.5])
def test_a_gradient_whose_memory_is_freed_is_refused(early, left):
    net, optimizer = pair(**early)[0]
    loss_of(net, 0).backward()
    storage = net[0].weight.grad.untyped_storage()
    storage.resize_(int(storage.nbytes() * left))
    with pytest.raises(ValueError, match=r"but its storage has .* hint: the program has freed it"):
        optimizer.step()


@pytest.mark.parametrize("sizes", [(5, 7), (5, 1 << 15), (1 << 15,)])
def test_gradients_of_any_size_that_change_cross_again(sizes):
    params = [torch.nn.Parameter(torch.zeros(size).bfloat16()) for size in sizes]
    optimizer = stepwell.OffloadAdamW(params, lr=0.1, accumulation_steps=1)
    twins = [torch.nn.Parameter(param.detach().clone()) for param in params]
    other = stepwell.OffloadAdamW(twins, lr=0.1)
    for _ in range(3):
        for tensors in (params, twins):
            sum((each.float() * torch.arange(len(each))).sum() for each in tensors).backward()
            for each in tensors:
                each.grad.data.mul_(-0.5)
        for each in (optimizer, other):
            each.step()
            each.zero_grad()
    optimizer.synchronize()
    other.synchronize()
    for param, twin in zip(params, twins, strict=True):
        assert torch.equal(param, twin)
