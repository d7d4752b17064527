"""Methods of ZeRO-3's optimizer, each by itself: backwards and gradients.

As `zero_1_2_stand_ins.py`.
"""

from types import SimpleNamespace

import pytest
import torch
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3
from stand_in_optimizers import (
    Timers,
    backward_of,
    noted,
    optimizer_of,
    parameter,
    partitions_of,
    several,
)
from stepwell.deepspeed.zero import stage_3
from stepwell.deepspeed.zero.fragment import Fragment
from stepwell.deepspeed.zero.stage_3 import OffloadZeroOptimizerStage3
from stepwell.deepspeed.zero.sub_group_gradients import SubGroupGradients
from stepwell.deepspeed.zero.unreduced import UnreducedGradients

BF16, FP32 = torch.bfloat16, torch.float32


def made(**fields):
    return optimizer_of(OffloadZeroOptimizerStage3, fields)


# ---- backwards ----


@pytest.mark.parametrize(
    ("name", "arguments", "expected"),
    [
        ("scale_if_loss", ["loss"], ["announce", "theirs"]),
        ("clear_backward_seen_flag", [], ["note_forward", "theirs"]),
        ("backward_prologue", [], ["begin", "let_go", "theirs"]),
        ("reduce_ready_partitions_and_remove_grads", ["param"], ["note_gradient", "theirs"]),
        ("backward_epilogue", [], ["theirs", "end"]),
    ],
)
def test_what_a_backward_tells(monkeypatch, name, arguments, expected):
    calls = []
    monkeypatch.setattr(DeepSpeedZeroOptimizer_Stage3, name, noted(calls, "theirs", "returned"))
    fetcher = SimpleNamespace(is_behind_step=True)
    optimizer = made(
        _backward=backward_of(calls),
        _partitions=SimpleNamespace(let_go=noted(calls, "let_go")),
        _fetcher=fetcher,
        _is_after_step=True,
    )
    returned = getattr(optimizer, name)(*arguments)
    assert calls == expected
    assert returned == ("returned" if name == "scale_if_loss" else None)
    is_behind = name != "backward_prologue"
    assert optimizer._is_after_step is fetcher.is_behind_step is is_behind


@pytest.mark.parametrize("is_unended", [False, True])
def test_zero_grad_behind_a_failed_backward_drops_all(monkeypatch, is_unended):
    calls = []
    monkeypatch.setattr(
        DeepSpeedZeroOptimizer_Stage3,
        "zero_grad",
        lambda _, set_to_none: calls.append(set_to_none),
    )
    optimizer = made(
        _backward=SimpleNamespace(is_unended=is_unended, note_cleared=noted(calls, "cleared")),
        _drop_gradients=noted(calls, "all"),
        _gradients=SubGroupGradients(
            SimpleNamespace(drop_sums=noted(calls, "sums")),
            SimpleNamespace(drop=noted(calls, "share")),
            FP32,
        ),
        timers=Timers(),
    )
    optimizer.timers("backward").start()
    for set_to_none in (False, True):
        optimizer.zero_grad(set_to_none)
        dropped = ["all"] if is_unended else ["sums", "share", set_to_none]
        assert calls == ["cleared", *dropped]
        calls.clear()
    optimizer.zero_grad()
    assert calls[-1] == ("all" if is_unended else True)
    assert optimizer.timers.running == ([] if is_unended else ["backward"])


@pytest.mark.parametrize("is_any_complete", [False, True])
@pytest.mark.parametrize("is_cleared", [False, True])
def test_a_backward_drops_what_was_left_out(monkeypatch, is_cleared, is_any_complete):
    calls = []
    monkeypatch.setattr(DeepSpeedZeroOptimizer_Stage3, "backward_prologue", noted(calls, "theirs"))
    optimizer = made(
        _backward=backward_of([], is_cleared=is_cleared),
        _partitions=partitions_of(calls, is_any_complete=is_any_complete),
        _fetcher=None,
    )
    optimizer.backward_prologue()
    dropped = ["dropped"] if is_cleared and is_any_complete else []
    assert calls == [*dropped, "let_go", "theirs"]


@pytest.mark.parametrize("resolves", [False, True])
def test_nothing_is_left_of_gradients_that_are_dropped(monkeypatch, resolves):
    calls = []
    monkeypatch.setattr(get_accelerator(), "resolves_data_dependency", lambda: resolves)
    param = parameter(0)
    param.grad = torch.ones(4)

    def zero_grad(_, set_to_none):
        calls.append((param.grad, set_to_none))

    monkeypatch.setattr(DeepSpeedZeroOptimizer_Stage3, "zero_grad", zero_grad)
    optimizer = made(
        fp16_groups=[[param]],
        _partitions=SimpleNamespace(drop=noted(calls, "dropped")),
        _share=SimpleNamespace(drop=noted(calls, "share")),
        reduce_and_partition_stream=SimpleNamespace(synchronize=noted(calls, "reduced")),
        ipg_buckets={BF16: SimpleNamespace(clear_params=noted(calls, "bucket"))},
        params_already_reduced={0: True, 1: False, 2: True},
        _offload_boundary_param_ids={0},
        parameter_offload=SimpleNamespace(release_backward_leftovers=noted(calls, "leftovers")),
        _partition_all_parameters=noted(calls, "released"),
        _backward=SimpleNamespace(reset=noted(calls, "reset")),
        _backward_hook_state=SimpleNamespace(backward_active_depth=2),
    )
    optimizer._drop_gradients()
    waits = [] if resolves else ["reduced"]
    # No gradient is freed before the reduction that writes it has ended.
    dropped = ["dropped", "share", *waits, "bucket", (None, True)]
    assert calls == [*dropped, "leftovers", "released", "reset"]
    assert optimizer.params_already_reduced == dict.fromkeys(range(3), False)
    assert optimizer._offload_boundary_param_ids == set()
    assert optimizer._backward_active_depth == 0


# ---- gradients ----


class Held:
    """What holds gradients: notes what it is given."""

    def __init__(self, groups=(), numel=2):
        self.groups, self.numel, self.calls = groups, numel, []

    def __contains__(self, group):
        return group in self.groups

    def collect_all(self, parts, *, is_last):
        self.calls += [
            (each.fragment, each.piece.tolist(), each.is_owned, is_last) for each in parts
        ]

    def add(self, fragment, piece):
        self.calls.append((fragment, piece.tolist()))

    def gradient(self, fragment):
        return torch.full((self.numel,), float(fragment.begin), dtype=BF16)

    def set_gradient(self, fragment, value):
        self.calls.append((fragment, value.tolist()))


def holding(rank=0, world_size=2):
    """Two parameters of three elements, of which each rank has two; the first is in the share."""
    params = [parameter(0, numel=3, world_size=world_size) for _ in range(2)]
    params[1].ds_id = 1
    share, gradients = Held({0}), Held()
    optimizer = made(
        grad_position={0: [0, 8, 2], 1: [1, 6, 2]},
        fp16_groups=[[params[0]], [params[1]]],
        _gradients=SubGroupGradients(gradients, share, FP32),
        _get_param_partition_rank=lambda param: rank,
        _offload_boundary_param_ids=set(),
        gradient_accumulation_dtype=FP32,
        is_gradient_accumulation_boundary=lambda: True,
    )
    return optimizer, params, share, gradients


@pytest.mark.parametrize("is_last", [False, True])
def test_reduced_pieces_are_collected(is_last):
    optimizer, params, share, gradients = holding()
    optimizer.is_gradient_accumulation_boundary = lambda: is_last
    for param in params:
        param.grad = torch.ones(3)
    collected = []
    gradients.collect_all = lambda parts, *, is_last: collected.append((*parts, is_last))
    pieces = [torch.ones(2), torch.ones(2)]
    optimizer.partition_grads(params, pieces)
    assert share.calls == [(Fragment(0, 8, 2), [1, 1])]
    ((part, found_last),) = collected
    assert found_last is is_last
    assert (part.fragment, part.piece.tolist(), part.is_owned) == (Fragment(1, 6, 2), [1, 1], True)
    # They lie in a bucket, which is written again.
    assert part.piece.data_ptr() != pieces[1].data_ptr()
    assert [param.grad for param in params] == [None, None]
    assert optimizer._offload_boundary_param_ids == {0, 1}


def waiting(*, is_contiguous=False):
    """An optimizer whose gradients wait for their reduction, and the bucket."""
    bucket = SimpleNamespace(params=[], elements=0, process_group=None)
    optimizer = made(
        contiguous_gradients=is_contiguous,
        ipg_buckets={BF16: bucket},
        get_param_comm_dtype=lambda param: BF16,
        _get_param_partition_group=lambda param: "group",
        _unreduced=UnreducedGradients(),
        all2all_process_group=None,
        reduce_and_partition_stream=None,
        dtype=FP32,
        reduce_bucket_size=100,
    )
    return optimizer, bucket


@pytest.mark.parametrize("is_shared", [False, True])
def test_a_gradient_waits_where_it_is_but_for_one_that_shares_its_memory(monkeypatch, is_shared):
    monkeypatch.setattr(get_accelerator(), "resolves_data_dependency", lambda: False)
    monkeypatch.setattr(get_accelerator(), "current_stream", lambda: "stream")
    optimizer, bucket = waiting()
    memory = torch.ones(1, 3)
    grads = [memory.squeeze(0) if is_shared else torch.ones(3), torch.ones(3)]
    params = [parameter(nth, numel=3) for nth in range(2)]
    for param, grad in zip(params, grads, strict=True):
        param.grad = grad
        at = grad.data_ptr()
        optimizer._DeepSpeedZeroOptimizer_Stage3__add_grad_to_ipg_bucket(param)
        is_moved = param.grad.data_ptr() != at
        assert is_moved is (is_shared and param is params[0])
        assert param.grad.tolist() == [1, 1, 1]
    assert bucket.params == params
    assert (bucket.elements, bucket.process_group) == (6, "group")
    followed = []
    optimizer._unreduced.order(SimpleNamespace(wait_stream=followed.append))
    assert followed == ["stream"]


def test_what_waits_is_as_deepspeeds_buffer_has_it():
    # No views, which would share their memory.
    columns = torch.empty_strided((2, 3), (1, 2)).copy_(torch.arange(6.0).view(2, 3))
    unreduced = UnreducedGradients()
    for grad, dtype in ((columns, FP32), (torch.ones(3), BF16)):
        expected = grad.tolist()
        unreduced.add(grad, dtype)
        assert (grad.tolist(), grad.dtype) == (expected, dtype)
        assert grad.is_contiguous()


@pytest.mark.parametrize("resolves", [False, True])
def test_a_reduction_is_behind_what_makes_its_gradients(monkeypatch, resolves):
    calls = []
    name = "_DeepSpeedZeroOptimizer_Stage3__reduce_and_partition_ipg_grads"
    monkeypatch.setattr(DeepSpeedZeroOptimizer_Stage3, name, noted(calls, "reduced"))
    monkeypatch.setattr(get_accelerator(), "resolves_data_dependency", lambda: resolves)
    monkeypatch.setattr(get_accelerator(), "current_stream", lambda: "stream")
    optimizer, _ = waiting()
    optimizer.reduce_and_partition_stream = SimpleNamespace(
        wait_stream=lambda stream: calls.append(stream)
    )
    param = parameter(0, numel=3)
    param.grad = torch.ones(3)
    optimizer._DeepSpeedZeroOptimizer_Stage3__add_grad_to_ipg_bucket(param)
    at = param.grad.data_ptr()
    getattr(optimizer, name)(BF16)
    assert calls == [*([] if resolves else ["stream"]), "reduced"]
    # The reduction of a lone gradient is in its own memory.
    assert param.grad.data_ptr() != at
    assert param.grad.tolist() == [1, 1, 1]


REDUCE = "_DeepSpeedZeroOptimizer_Stage3__reduce_and_partition_ipg_grads"


@pytest.mark.parametrize("kind", ["cuda", "cpu"])
def test_the_end_of_a_backward_waits_for_reductions_on_the_device_alone(monkeypatch, kind):
    calls = []
    monkeypatch.setattr(
        DeepSpeedZeroOptimizer_Stage3,
        "independent_gradient_partition_epilogue",
        noted(calls, "theirs"),
    )
    stream = SimpleNamespace(wait_stream=lambda other: calls.append(f"waits for {other}"))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: stream)
    optimizer = made(
        ipg_buckets={BF16: None, torch.float32: None},
        reduce_and_partition_stream="reductions",
        params_already_reduced={0: True, 1: False, 2: True},
        _backward_hook_state=SimpleNamespace(epilogue_ran_this_backward=False),
        _partitions=SimpleNamespace(device=torch.device(kind)),
        **{REDUCE: calls.append},
    )
    optimizer.independent_gradient_partition_epilogue()
    if kind == "cpu":
        assert calls == ["theirs"]
        return
    # In one order on all ranks.
    assert sorted(calls[:2], key=str) == [BF16, torch.float32]
    assert calls[2:] == ["waits for reductions"]
    assert optimizer.params_already_reduced == dict.fromkeys(range(3), False)
    assert optimizer._backward_hook_state.epilogue_ran_this_backward


def moved(optimizer, bucket, monkeypatch):
    """Which gradients of a bucket are in other memory when DeepSpeed reduces them."""
    places = [param.grad.data_ptr() for param in bucket.params]
    values = [param.grad.tolist() for param in bucket.params]
    found = []

    def reduce(*_):
        found.extend(param.grad.data_ptr() for param in bucket.params)

    monkeypatch.setattr(DeepSpeedZeroOptimizer_Stage3, REDUCE, reduce)
    getattr(optimizer, REDUCE)(BF16)
    assert [param.grad.tolist() for param in bucket.params] == values
    return [now != before for now, before in zip(found, places, strict=True)]


def filled(bucket, *shapes):
    bucket.params = [parameter(nth) for nth in range(len(shapes))]
    for param, shape in zip(bucket.params, shapes, strict=True):
        param.data = torch.zeros(shape)
        param.grad = torch.ones(shape)
    bucket.elements = sum(param.numel() for param in bucket.params)


def test_several_gradients_are_reduced_elsewhere(monkeypatch):
    optimizer, bucket = waiting()
    filled(bucket, 3, 3)
    assert moved(optimizer, bucket, monkeypatch) == [False, False]


@pytest.mark.parametrize("is_contiguous", [False, True])
@pytest.mark.parametrize("holder", [None, "view", "storage"])
def test_one_larger_than_a_bucket_is_reduced_where_it_is_unless_others_hold_it(
    monkeypatch, holder, is_contiguous
):
    optimizer, bucket = waiting(is_contiguous=is_contiguous)
    filled(bucket, 101)
    (param,) = bucket.params
    holders = {"view": lambda: param.grad[:1], "storage": lambda: param.grad.untyped_storage()}
    held = holder and holders[holder]()
    assert moved(optimizer, bucket, monkeypatch) == [holder is not None]
    del held
    # DeepSpeed's buffer has one that fits.
    filled(bucket, 100)
    assert moved(optimizer, bucket, monkeypatch) == [not is_contiguous]


@pytest.mark.parametrize("device_count", [1, 2])
def test_what_deepspeed_does_not_quantize_it_reduces_one_by_one(monkeypatch, device_count):
    several(monkeypatch, stage_3.dist, world_size=2)
    monkeypatch.setattr(get_accelerator(), "device_count", lambda: device_count)
    optimizer, bucket = waiting()
    optimizer.all2all_process_group = "groups"
    filled(bucket, (2, 2), (3, 2), (4,), (4, 3))
    expected = [False, device_count == 1, device_count == 1, False]
    assert moved(optimizer, bucket, monkeypatch) == expected


def test_gradients_go_to_deepspeeds_buffer_where_that_is_what_is_reduced(monkeypatch):
    calls = []
    name = "_DeepSpeedZeroOptimizer_Stage3__add_grad_to_ipg_bucket"
    monkeypatch.setattr(DeepSpeedZeroOptimizer_Stage3, name, noted(calls, "theirs"))
    optimizer, bucket = waiting(is_contiguous=True)
    getattr(optimizer, name)(parameter(0))
    assert calls == ["theirs"]
    assert bucket.params == []


@pytest.mark.parametrize("piece", [torch.ones(2, dtype=BF16), torch.ones(1)])
def test_pieces_that_are_copied_here_may_be_kept(piece):
    optimizer, params, _, gradients = holding(rank=1)
    optimizer.partition_grads(params[1:], [piece])
    # The last piece of a parameter may be shorter.
    assert gradients.calls == [
        (Fragment(1, 6, 2), [1, 1] if piece.numel() == 2 else [1, 0], True, True)
    ]


@pytest.mark.parametrize(("rank", "count"), [(1, 1), (2, 0)])
def test_beyond_the_end_of_a_parameter_there_is_no_gradient(rank, count):
    optimizer, params, _, gradients = holding(rank=rank)
    # Of three ranks the second has the last two of four elements.
    params[1].ds_numel = 4
    params[1].grad = torch.ones(3)
    optimizer.partition_grads(params[1:], [torch.ones(2)])
    assert len(gradients.calls) == len(optimizer._offload_boundary_param_ids) == count
    assert params[1].grad is None


@pytest.mark.parametrize("is_synchronized", [False, True])
def test_gradients_are_not_freed_before_their_reduction(monkeypatch, is_synchronized):
    recorded = []
    optimizer, params, _, _ = holding()
    monkeypatch.setattr(get_accelerator(), "is_synchronized_device", lambda: is_synchronized)
    monkeypatch.setattr(get_accelerator(), "current_stream", lambda: "stream")
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda _, stream: recorded.append(stream))
    params[0].grad = torch.ones(3)
    optimizer.partition_grads(params, [torch.ones(2), torch.ones(2)])
    assert recorded == ([] if is_synchronized else ["stream"])


def test_gradients_are_those_of_what_holds_them():
    optimizer, params, _, _ = holding()
    grad, group = optimizer._get_fp32_grad_state_partition(params[0], release_swap_buffers=False)
    assert (grad.tolist(), group) == ([8, 8], 0)
    found = optimizer.get_fp32_grad_partitions()
    assert {group: list(grads) for group, grads in found.items()} == {0: [0], 1: [0]}
    assert (found[1][0].tolist(), found[1][0].dtype) == ([6, 6], FP32)


@pytest.mark.parametrize(("rank", "piece"), [(0, [1, 2]), (1, [3, 0])])
def test_a_rank_sets_its_piece_of_a_gradient(rank, piece):
    optimizer, params, share, gradients = holding(rank=rank)
    value = torch.tensor([[1.0], [2.0], [3.0]])
    for param in params:
        optimizer.set_fp32_grad_for_param(value, param)
    assert share.calls == [(Fragment(0, 8, 2), piece)]
    assert gradients.calls == [(Fragment(1, 6, 2), piece)]
    params[0].requires_grad = False
    optimizer.set_fp32_grad_for_param(value, params[0])
    assert len(share.calls) == 1


def test_a_piece_is_set_as_a_whole():
    optimizer, params, share, gradients = holding()
    optimizer.set_local_grad_for_param(torch.tensor([[1.0], [2.0]]), params[1])
    assert gradients.calls == [(Fragment(1, 6, 2), [1, 2])]
    with pytest.raises(ValueError, match=r"`value` has `3` elements, expected 2: .* hint: "):
        optimizer.set_local_grad_for_param(torch.zeros(3), params[1])
    params[0].requires_grad = False
    optimizer.set_local_grad_for_param(torch.zeros(3), params[0])
    assert share.calls == []


def test_gradients_are_set_by_what_they_are():
    optimizer, params, share, gradients = holding()
    optimizer.get_fp32_grad_for_param = lambda param: torch.full((3,), float(param.ds_id))
    params[0].requires_grad = False
    optimizer.update_fp32_grad_for_param_vectorized(
        lambda grad, param: grad + 10 * param.ds_id, params
    )
    assert (share.calls, gradients.calls) == ([], [(Fragment(1, 6, 2), [11, 11])])
