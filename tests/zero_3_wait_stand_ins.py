"""Methods of ZeRO-3's optimizer, each by itself: what waits for its step.

As `zero_1_2_stand_ins.py`.
"""

from types import SimpleNamespace

import pytest
import torch
from deepspeed.runtime.zero.offload_config import OffloadStateTypeEnum
from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus
from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3
from stand_in_optimizers import noted, optimizer_of, parameter, several
from stepwell.deepspeed.zero import stage_3
from stepwell.deepspeed.zero.fragment import Fragment
from stepwell.deepspeed.zero.persistent import Upload
from stepwell.deepspeed.zero.stage_3 import OffloadZeroOptimizerStage3

BF16 = torch.bfloat16


def made(**fields):
    return optimizer_of(OffloadZeroOptimizerStage3, fields)


def upload_of(numel, world_size=1):
    return Upload(
        Fragment(0, 0, numel), torch.zeros(numel), torch.arange(float(world_size * numel))
    )


def gating(*, is_protected=True, gathers=None, is_open=True):
    calls = []
    param = parameter(0, numel=3)
    param.ds_status = ZeroParamStatus.NOT_AVAILABLE
    optimizer = made(
        _plan=SimpleNamespace(gate="module"),
        _protect=lambda operands, uploads: is_protected,
        _gate=SimpleNamespace(is_open=is_open, open=lambda params: calls.append("opened")),
        _gathers=gathers,
        _uploads=SimpleNamespace(expect=lambda uploads: calls.append("expected")),
    )
    return optimizer, param, calls


@pytest.mark.parametrize("is_protected", [False, True])
@pytest.mark.parametrize("gathers", [None, "gathers"])
@pytest.mark.parametrize("is_open", [False, True])
def test_persistent_weights_have_their_place_before_the_step(is_protected, gathers, is_open):
    optimizer, param, calls = gating(is_protected=is_protected, gathers=gathers, is_open=is_open)
    upload = upload_of(2, world_size=2)
    assert optimizer._open_gate([], {param: upload}) is is_protected
    if not is_protected and gathers is None:
        assert (calls, param.ds_status) == ([], ZeroParamStatus.NOT_AVAILABLE)
        return
    # So DeepSpeed does not gather it. What pads the last piece is no weight.
    assert param.ds_status == ZeroParamStatus.AVAILABLE
    assert param.data.tolist() == [0, 1, 2]
    assert param.data_ptr() == upload.target.data_ptr()
    assert calls == ["expected"] * (gathers is None) + ["opened"] * is_open


def test_what_has_nothing_to_upload_is_protected_all_the_same():
    optimizer, param, calls = gating()
    assert optimizer._open_gate([], {}) is True
    optimizer._gate = None
    assert optimizer._open_gate([], {param: upload_of(3)}) is True
    assert calls == []
    optimizer._plan.gate = "step"
    assert optimizer._open_gate([], {}) is False


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

    def __init__(self, params, uploads, *, confirm=None):
        self.params, self.uploads, self.confirm = params, uploads, confirm
        self.is_open, self.guard = True, SimpleNamespace(was_compiled=False)
        self.calls = []

    def finish(self):
        self.calls.append("finished")

    def close(self):
        self.calls.append("closed")
        self.is_open = False


def going_up(monkeypatch, *, world_size=1, gathers=None, are_copied_late=False, share=()):
    several(monkeypatch, stage_3.dist, world_size=world_size)
    monkeypatch.setattr(stage_3, "Gate", Gate)
    monkeypatch.setattr(stage_3, "PersistentUploads", lambda *arguments: arguments)
    param = parameter(0)
    flat = torch.arange(6.0, dtype=BF16)
    stepped = [param]
    return made(
        dp_process_group="ranks",
        _gate=None,
        _gathers=gathers,
        _partitions=SimpleNamespace(are_copied_late=are_copied_late),
        _share=share,
        # In a common order where several ranks gather them.
        _persistent_stepped=lambda: stepped if world_size == 1 else None,
        _gathered_behind=lambda: stepped if world_size > 1 else None,
        fp16_partitioned_groups_flat=[flat],
        fp32_partitioned_groups_flat=[flat + 10],
        grad_position={0: [0, 2, 3]},
    ), stepped


@pytest.mark.parametrize("world_size", [1, 3])
def test_persistent_weights_go_up_by_themselves(monkeypatch, world_size):
    gathers = None if world_size == 1 else SimpleNamespace(confirm="confirm")
    optimizer, (param,) = going_up(monkeypatch, world_size=world_size, gathers=gathers)
    ((known, upload),) = optimizer._persistent_uploads().items()
    gate = optimizer._gate
    assert known is param
    assert upload.fragment == Fragment(0, 2, 3)
    assert upload.source.tolist() == [2, 3, 4]
    # Each rank's piece has its place.
    assert (upload.target.numel(), upload.target.dtype) == (3 * world_size, BF16)
    assert gate.params == [param]
    if gathers is None:
        assert gate.uploads is optimizer._uploads
        device = torch.device("cpu")
        assert (*gate.uploads, gate.confirm) == (optimizer._partitions, device, None)
    else:
        assert (gate.uploads, gate.confirm) == (gathers, "confirm")
    # The last step's are waited for before these.
    assert gate.calls == ["finished"]
    assert len(optimizer._persistent_uploads()) == 1
    assert optimizer._gate is gate
    assert gate.calls == ["finished"] * 2


@pytest.mark.parametrize("share", [(), (0,)])
def test_what_goes_up_is_what_a_step_writes_first(monkeypatch, share):
    """A weight that is a copy of its master is written behind the step, but on the device."""
    optimizer, _ = going_up(monkeypatch, are_copied_late=True, share=share)
    (upload,) = optimizer._persistent_uploads().values()
    assert upload.source.tolist() == ([2, 3, 4] if share else [12, 13, 14])


@pytest.mark.parametrize("gathers", [None, SimpleNamespace(confirm="confirm")])
def test_where_code_was_compiled_deepspeed_gathers_on_one_rank(monkeypatch, gathers):
    world_size = 1 if gathers is None else 2
    optimizer, _ = going_up(monkeypatch, world_size=world_size, gathers=gathers)
    optimizer._persistent_uploads()
    optimizer._gate.guard.was_compiled = True
    assert len(optimizer._persistent_uploads()) == (gathers is not None)
    assert optimizer._gate.calls == ["finished", "finished", "closed"]


def test_deepspeed_gathers_where_there_is_nothing_to_go_up(monkeypatch):
    optimizer, _ = going_up(monkeypatch, world_size=2)
    assert optimizer._persistent_uploads() == {}
    optimizer, stepped = going_up(monkeypatch)
    stepped.clear()
    assert optimizer._persistent_uploads() == {}
    assert optimizer._gate is None


@pytest.mark.parametrize("has_gate", [False, True])
def test_what_is_in_host_memory_stays_there(monkeypatch, has_gate):
    wanted, calls = [], []
    monkeypatch.setattr(
        DeepSpeedZeroOptimizer_Stage3, "offload_states", lambda _, include: wanted.append(include)
    )
    optimizer = made(
        _partitions=SimpleNamespace(
            finish=noted(calls, "finished"), synchronize=noted(calls, "streams")
        ),
        _gate=SimpleNamespace(finish=noted(calls, "gate")) if has_gate else None,
    )
    weights, buffer = OffloadStateTypeEnum.lp_params, OffloadStateTypeEnum.contiguous_grad_buffer
    optimizer.offload_states()
    assert calls == ["finished", *(["gate"] if has_gate else []), "streams"]
    optimizer.offload_states([OffloadStateTypeEnum.optim_states, buffer])
    assert wanted == [[weights, buffer], [buffer]]
