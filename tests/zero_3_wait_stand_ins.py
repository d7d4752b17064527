"""Methods of ZeRO-3's optimizer, each by itself: what waits for its step.

As `zero_1_2_stand_ins.py`.
"""

from types import SimpleNamespace

import pytest
import torch
from deepspeed.runtime.zero.offload_config import OffloadStateTypeEnum
from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus
from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3
from stand_in_optimizers import noted, optimizer_of, parameter
from stepwell.deepspeed.zero import persistent_gate
from stepwell.deepspeed.zero.fragment import Fragment
from stepwell.deepspeed.zero.persistent import Upload
from stepwell.deepspeed.zero.persistent_gate import PersistentGate
from stepwell.deepspeed.zero.stage_3 import OffloadZeroOptimizerStage3

BF16 = torch.bfloat16


def made(**fields):
    return optimizer_of(OffloadZeroOptimizerStage3, fields)


def upload_of(numel, world_size=1):
    return Upload(
        Fragment(0, 0, numel), torch.zeros(numel), torch.arange(float(world_size * numel))
    )


def gating(*, is_gathered=False, is_open=True):
    calls = []
    param = parameter(0, numel=3)
    param.ds_status = ZeroParamStatus.NOT_AVAILABLE
    gate = PersistentGate({}, None, None)
    gate._gate = SimpleNamespace(
        is_open=is_open,
        open=lambda params: calls.append("opened"),
        wait_for_uncovered=noted(calls, "uncovered"),
        finish=noted(calls, "finished"),
    )
    gate._gathers = "gathers" if is_gathered else None
    gate._uploads = SimpleNamespace(expect=lambda uploads: calls.append("expected"))
    return gate, param, calls


@pytest.mark.parametrize("is_protected", [False, True])
@pytest.mark.parametrize("is_gathered", [False, True])
@pytest.mark.parametrize("is_open", [False, True])
def test_persistent_weights_have_their_place_before_the_step(is_protected, is_gathered, is_open):
    gate, param, calls = gating(is_gathered=is_gathered, is_open=is_open)
    upload = upload_of(2, world_size=2)
    gate.open({param: upload}, is_protected=is_protected)
    if not is_protected and not is_gathered:
        assert (calls, param.ds_status) == ([], ZeroParamStatus.NOT_AVAILABLE)
        return
    # So DeepSpeed does not gather it. What pads the last piece is no weight.
    assert param.ds_status == ZeroParamStatus.AVAILABLE
    assert param.data.tolist() == [0, 1, 2]
    assert param.data_ptr() == upload.target.data_ptr()
    assert calls == ["expected"] * (not is_gathered) + ["opened"] * is_open


def test_where_nothing_comes_nothing_is_opened():
    gate, _, calls = gating(is_gathered=True)
    gate.open({}, is_protected=True)
    assert calls == []
    gate = PersistentGate({}, None, None)
    assert gate.uploads([], []) == {}
    gate.open({}, is_protected=True)
    gate.end_step(is_protected=False)
    gate.finish()
    gate.end()
    assert not gate.is_gathered
    assert gate.submission({}) == []
    with gate.decided():
        pass


@pytest.mark.parametrize("is_protected", [False, True])
@pytest.mark.parametrize("is_open", [False, True])
def test_a_step_waits_for_what_nothing_else_would(is_protected, is_open):
    gate, _, calls = gating(is_open=is_open)
    gate.end_step(is_protected=is_protected)
    assert calls == ["uncovered" if is_protected and is_open else "finished"]


def test_no_step_follows_an_end():
    gate, _, calls = gating(is_gathered=True)
    gate._fragments = {"param": Fragment(0, 0, 3)}
    gate.end()
    assert calls == ["finished"]
    assert not gate.is_gathered
    assert gate.uploads([], []) == {}


def test_each_partition_waits_for_its_own_part():
    found = []
    flats = [torch.zeros(4), torch.zeros(4), torch.zeros(1)]
    params = [parameter(ds_id) for ds_id in range(4)]
    for param, flat, begin in zip(params, (*flats[:1] * 2, *flats[1:]), (0, 2, 0, 0), strict=True):
        param.ds_tensor = flat[begin : begin + 2]
    memory = torch.zeros(5)
    written = [[torch.zeros(4), "no tensor"], None, [torch.zeros(1)]]
    optimizer = made(
        fp16_partitioned_groups_flat=flats,
        fp16_groups=[params[:2], params[2:3], params[3:]],
        _share={1},
        param_groups_fp16_flat_cpu_memory=[memory],
        grad_position={0: [0, 0, 2], 1: [0, 2, 2], 2: [1, 0, 2], 3: [2, 0, 1]},
        _operands=SimpleNamespace(written=lambda group, operand: written[group]),
        _partitions=SimpleNamespace(protect=lambda *arguments: found.append(arguments) or "told"),
    )
    operands = [SimpleNamespace(master=torch.zeros(numel)) for numel in (4, 4, 1)]
    uploads = {"param": upload_of(2)}
    assert optimizer._protect(operands, uploads) == "told"
    ((parts, holders),) = found
    first, last = Fragment(0, 0, 4), Fragment(2, 0, 1)
    expected = [
        (flats[0], [first]),
        (memory, [first, last]),
        (written[0][0], [first]),
        (params[0].ds_tensor, [Fragment(0, 0, 2)]),
        (params[1].ds_tensor, [Fragment(0, 2, 2)]),
        (flats[2], [last]),
        (written[2][0], [last]),
        (params[3].ds_tensor, [last]),
    ]
    assert [(id(tensor), part) for tensor, part in parts.items()] == [
        (id(tensor), part) for tensor, part in expected
    ]
    # Other elements of the same memory.
    known = [uploads["param"].source, flats[1], params[2].ds_tensor]
    assert list(map(id, holders)) == list(map(id, known))


class Gate:
    """Is open, unless the test says otherwise."""

    def __init__(self, module, params):
        self.module, self.is_open, self.calls = module, True, []

    def attach(self, params, uploads):
        self.params, self.uploads = params, uploads

    def finish(self):
        self.calls.append("finished")


class Gathered:
    """Notes what it is made of, and gathers nothing."""

    def __init__(self, *arguments):
        self.arguments = arguments

    def submission(self, uploads):
        return [uploads]

    def decided(self):
        return "decided"


FLAT = torch.arange(6.0, dtype=BF16)


def going_up(monkeypatch, *, world_size=1, are_copied_late=False):
    """A gate of one parameter, what gives its uploads, and the parameter."""
    monkeypatch.setattr(persistent_gate, "Gate", Gate)
    monkeypatch.setattr(persistent_gate, "PersistentUploads", lambda *arguments: arguments)
    monkeypatch.setattr(persistent_gate, "GatheredPersistents", Gathered)
    partitions = SimpleNamespace(are_copied_late=are_copied_late, device=torch.device("cpu"))
    peers = None if world_size == 1 else SimpleNamespace(world_size=world_size)
    param = parameter(0)
    gate = PersistentGate({param: Fragment(0, 2, 3)}, partitions, peers)
    gate.watch("module")
    return gate, lambda: gate.uploads([FLAT], [FLAT + 10]), param


@pytest.mark.parametrize("world_size", [1, 3])
def test_persistent_weights_go_up_by_themselves(monkeypatch, world_size):
    persistent, uploads, param = going_up(monkeypatch, world_size=world_size)
    assert persistent.is_gathered is (world_size > 1)
    found = uploads()
    ((known, upload),) = found.items()
    gate, partitions = persistent._gate, persistent._partitions
    assert known is param
    assert gate.module == "module"
    assert upload.fragment == Fragment(0, 2, 3)
    assert upload.source.tolist() == [2, 3, 4]
    # Each rank's piece has its place.
    assert (upload.target.numel(), upload.target.dtype) == (3 * world_size, BF16)
    assert list(map(id, gate.params)) == [id(param)]
    if world_size == 1:
        assert gate.uploads is persistent._uploads
        assert gate.uploads == (partitions, partitions.device)
    else:
        assert gate.uploads.arguments[0] is partitions
        assert persistent.submission(found) == [found]
        assert persistent.decided() == "decided"
    # The last step's are waited for before these.
    assert gate.calls == ["finished"]
    assert len(uploads()) == 1
    assert persistent._gate is gate
    assert gate.calls == ["finished"] * 2


def test_what_goes_up_is_what_a_step_writes_first(monkeypatch):
    """A weight that is a copy of its master is written behind the step."""
    _, uploads, _ = going_up(monkeypatch, are_copied_late=True)
    (upload,) = uploads().values()
    assert upload.source.tolist() == [12, 13, 14]


@pytest.mark.parametrize("world_size", [1, 2])
def test_where_code_was_compiled_deepspeed_gathers_on_one_rank(monkeypatch, world_size):
    persistent, uploads, _ = going_up(monkeypatch, world_size=world_size)
    uploads()
    persistent._gate.is_open = False
    assert len(uploads()) == (world_size > 1)
    assert persistent._gate.calls == ["finished", "finished"]


def test_what_is_in_host_memory_stays_there(monkeypatch):
    wanted, calls = [], []
    monkeypatch.setattr(
        DeepSpeedZeroOptimizer_Stage3, "offload_states", lambda _, include: wanted.append(include)
    )
    optimizer = made(
        _partitions=SimpleNamespace(
            finish=noted(calls, "finished"), synchronize=noted(calls, "streams")
        ),
        _persistent=SimpleNamespace(finish=noted(calls, "gate")),
    )
    weights, buffer = OffloadStateTypeEnum.lp_params, OffloadStateTypeEnum.contiguous_grad_buffer
    optimizer.offload_states()
    assert calls == ["finished", "gate", "streams"]
    optimizer.offload_states([OffloadStateTypeEnum.optim_states, buffer])
    assert wanted == [[weights, buffer], [buffer]]
