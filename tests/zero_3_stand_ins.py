"""Methods of ZeRO-3's optimizer, each by itself: what is made.

As `zero_1_2_stand_ins.py`.
"""

from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from deepspeed.runtime.zero.offload_config import (
    DeepSpeedZeroOffloadOptimizerConfig,
    DeepSpeedZeroOffloadParamConfig,
)
from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3
from stand_in_optimizers import noted, optimizer_of, parameter, several
from stepwell.deepspeed.zero import stage_3
from stepwell.deepspeed.zero.fetcher import Fetcher
from stepwell.deepspeed.zero.fragment import Fragment
from stepwell.deepspeed.zero.stage_3 import OffloadZeroOptimizerStage3

BF16, FP32 = torch.bfloat16, torch.float32
CPU = torch.device("cpu")


def made(**fields):
    return optimizer_of(OffloadZeroOptimizerStage3, fields)


# ---- what is made ----


class Hooks(Fetcher):
    """A fetcher of which nothing is made."""

    def __init__(self):
        pass


class Made:
    """Makes optimizers, and has what their parts were given."""

    def __init__(self, monkeypatch, *, world_size=1, coordinator=None, behind=()):
        several(monkeypatch, stage_3.dist, world_size=world_size, rank=0)
        self.given, self.calls, self.prefetch, self.opened = [], [], [], []
        self.partitions = SimpleNamespace(
            has_ended="has ended", resumed="counts", is_busy=False, device=CPU
        )

        def begin(optimizer, module, init_optimizer, **named):
            self.given.append(named)
            optimizer._partitions = self.partitions
            optimizer.dp_process_group = "ranks"
            optimizer.fp32_partitioned_groups_flat = "masters"

        def bound(found, may_prefetch):
            assert found is coordinator
            self.prefetch.append(may_prefetch)

        base = DeepSpeedZeroOptimizer_Stage3
        monkeypatch.setattr(base, "__init__", begin)
        monkeypatch.setattr(base, "_get_param_coordinator", lambda _: coordinator)
        ours = OffloadZeroOptimizerStage3
        monkeypatch.setattr(ours, "_release_and_gather", noted(self.calls, "gathered"))
        monkeypatch.setattr(ours, "_persistent_fragments", lambda _: dict.fromkeys(behind))
        monkeypatch.setattr(stage_3, "bound_prefetch", bound)
        monkeypatch.setattr(stage_3, "is_little_ahead", lambda _: "little")
        operands = SimpleNamespace(resume=lambda *arguments: self.calls.append(arguments))
        monkeypatch.setattr(stage_3, "Operands", lambda *_: operands)

        def peers(group, *, instead):
            assert (group, instead) == ("ranks", '"stepwell": {"gate": "step"}')
            return SimpleNamespace(open_data=self.opened.append)

        monkeypatch.setattr(stage_3, "Peers", peers)
        monkeypatch.setattr(stage_3, "PersistentGate", lambda *arguments: arguments)

    def __call__(self, *, gate="module", is_resumed=False, param_config=None, module=None):
        return OffloadZeroOptimizerStage3(
            module or torch.nn.Linear(1, 1),
            None,
            plan=SimpleNamespace(gate=gate, is_resumed=is_resumed),
            offload_optimizer_config=DeepSpeedZeroOffloadOptimizerConfig(
                device="nvme", pin_memory=True
            ),
            offload_param_config=param_config,
            ds_config={"zero_optimization": {"offload_param": {"pin_memory": True}}},
        )


def pinned(given):
    """Whether DeepSpeed pins: state, weights as the configuration says, and as the JSON says."""
    weights = given["offload_param_config"]
    block = given["ds_config"]["zero_optimization"]["offload_param"]
    assert given["offload_optimizer_config"].device == "cpu"
    return (
        given["offload_optimizer_config"].pin_memory,
        None if weights is None else weights.pin_memory,
        block["pin_memory"],
    )


def test_deepspeed_pins_nothing_that_the_engine_pins(monkeypatch):
    make = Made(monkeypatch)
    config = DeepSpeedZeroOffloadParamConfig(device="cpu", pin_memory=True)
    frozen = torch.nn.Linear(1, 1)
    frozen.bias.requires_grad = False
    for options in (
        {},
        {"param_config": config},
        # What is not stepped the engine does not pin.
        {"param_config": config, "module": frozen},
    ):
        make(**options)
    assert list(map(pinned, make.given)) == [
        (False, None, True),
        (False, False, False),
        (False, True, True),
    ]


@pytest.mark.parametrize("is_resumed", [False, True])
def test_weights_of_a_volume_take_the_place_of_those_that_were_gathered(monkeypatch, is_resumed):
    make = Made(monkeypatch)
    make(is_resumed=is_resumed)
    assert make.calls == ([("counts", "masters"), "gathered"] if is_resumed else [])


@pytest.mark.parametrize("gate", ["module", "step"])
def test_a_fetcher_knows_when_a_step_has_ended(monkeypatch, gate):
    hooks = Hooks()
    make = Made(monkeypatch, coordinator=hooks)
    optimizer = make(gate=gate)
    assert (optimizer._fetcher, hooks.has_step_ended) == (hooks, "has ended")
    assert make.prefetch == []


@pytest.mark.parametrize("gate", ["module", "step"])
@pytest.mark.parametrize("world_size", [1, 2])
def test_deepspeeds_hooks_gather_little_behind_a_step(monkeypatch, gate, world_size):
    make = Made(monkeypatch, coordinator=SimpleNamespace(), world_size=world_size)
    optimizer = make(gate=gate)
    assert optimizer._fetcher is None
    assert len(make.prefetch) == (gate == "module")
    for may_prefetch in make.prefetch:
        assert may_prefetch() is True
        make.partitions.is_busy = True
        # The same on all ranks: whether the step is running is not.
        assert may_prefetch() is (world_size > 1)
        optimizer._set_after_step(is_after=True)
        assert may_prefetch() == (world_size > 1 and "little")


@pytest.mark.parametrize("gate", ["module", "step"])
@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("behind", [[], ["param"]])
def test_which_ranks_gather_persistent_parameters_themselves(monkeypatch, gate, world_size, behind):
    make = Made(monkeypatch, world_size=world_size, behind=behind)
    optimizer = make(gate=gate)
    fragments, partitions, peers = optimizer._persistent
    assert list(fragments) == (behind if gate == "module" else [])
    assert partitions is make.partitions
    is_gathered = bool(world_size > 1 and fragments)
    assert make.opened == [CPU] * is_gathered
    assert (peers is not None) is is_gathered


def test_at_first_ranks_are_together(monkeypatch):
    hooks = Hooks()
    hooks.gather_order = SimpleNamespace(end=lambda: [1.0, 1.0])
    optimizer = Made(monkeypatch, world_size=2, coordinator=hooks)()
    optimizer._share = SimpleNamespace(squares=lambda: 0.0)
    assert optimizer._add_up(torch.tensor(1.5)) == 3.0
    # None has left a step, and all have gathered alike.
    optimizer._round.check_left()
    optimizer._round.check_gathered(mock.Mock(side_effect=AssertionError))
    assert optimizer._round.has_left is False
    optimizer._backward.check()


@pytest.mark.parametrize("fetch", ["stepwell", "deepspeed"])
def test_hooks_are_those_of_the_plan(monkeypatch, fetch):
    monkeypatch.setattr(stage_3, "ModuleHooks", lambda **named: ("ours", named))
    monkeypatch.setattr(
        DeepSpeedZeroOptimizer_Stage3, "initialize_ds_offload", lambda _, **named: ("theirs", named)
    )
    optimizer = made(_plan=SimpleNamespace(fetch=fetch))
    expected = "ours" if fetch == "stepwell" else "theirs"
    assert optimizer.initialize_ds_offload(mpu=None) == (expected, {"mpu": None})


def persistent():
    """Of parameters 0 to 3 number 2 is in the share of the device, and number 1 is frozen."""
    params = [parameter(ds_id) for ds_id in range(4)]
    optimizer = made(
        persistent_parameters=params[::-1],
        grad_position={0: [1, 0, 4], 2: [0, 0, 4], 3: [1, 4, 4]},
        _share={0},
        zero_hpz_partition_size=1,
        dp_process_group="ranks",
    )
    return optimizer, params


@pytest.mark.parametrize("world_size", [1, 2])
def test_persistent_parameters_come_in_a_common_order(monkeypatch, world_size):
    several(monkeypatch, stage_3.dist, world_size=world_size)
    optimizer, params = persistent()
    expected = {params[0]: Fragment(1, 0, 4), params[3]: Fragment(1, 4, 4)}
    found = optimizer._persistent_fragments()
    assert list(map(id, found)) == list(map(id, expected))
    assert list(found.values()) == list(expected.values())
    # DeepSpeed gathers those of several ranks otherwise.
    optimizer.zero_hpz_partition_size = 2
    assert len(optimizer._persistent_fragments()) == (2 if world_size == 1 else 0)
    optimizer.zero_hpz_partition_size = 1
    monkeypatch.setattr(stage_3, "is_autocast_initialized", lambda: True)
    assert len(optimizer._persistent_fragments()) == (2 if world_size == 1 else 0)


@pytest.mark.parametrize(("partial_offload", "count"), [(1.0, 0), (0.5, 1), (0.4, 1), (0.0, 3)])
def test_masters_in_host_memory_are_made_without_data(partial_offload, count):
    optimizer = made(partial_offload=partial_offload, fp16_partitioned_groups_flat=[None] * 3)
    in_host_memory = dict.fromkeys(range(count, 3), "meta")
    optimizer.subgroup_to_device = {0: "cpu"}
    assert optimizer.subgroup_to_device == {0: "cpu"} | in_host_memory
    for group in range(3):
        optimizer.subgroup_to_device[group] = f"device {group}"
    on_device = {group: f"device {group}" for group in range(count)}
    assert optimizer.subgroup_to_device == on_device | in_host_memory


def test_weights_have_memory_of_their_own():
    params = [[parameter(0), parameter(1, numel=3)], []]
    optimizer = made(
        trainable_param_groups=[{"params": each} for each in params],
        dtype=BF16,
        _weight_buffers=[],
        param_groups_fp16_flat_cpu_memory=[],
    )
    optimizer._create_param_groups_fp16_flat_cpu_memory()
    found = optimizer.param_groups_fp16_flat_cpu_memory
    # An empty group has memory as well: none is pinned of no bytes.
    assert [(each.numel(), each.dtype) for each in found] == [(7, BF16), (1, BF16)]
    assert len(optimizer._weight_buffers) == 2


def test_masters_that_were_made_without_data_have_a_place_in_host_memory(monkeypatch):
    on_device, in_host_memory = torch.zeros(2), torch.zeros(3, device="meta")
    in_host_memory.ds_id = "4_7"

    def create(self):
        self.fp32_partitioned_groups_flat = [on_device, in_host_memory]

    monkeypatch.setattr(DeepSpeedZeroOptimizer_Stage3, "_create_fp32_partitions", create)
    optimizer = made()
    optimizer._create_fp32_partitions()
    first, second = optimizer.fp32_partitioned_groups_flat
    assert first is on_device
    assert (second.numel(), second.device, second.ds_id) == (0, CPU, "4_7")
    assert second.requires_grad


def test_there_is_no_flat_buffer_of_gradients(monkeypatch):
    monkeypatch.setattr(
        DeepSpeedZeroOptimizer_Stage3,
        "_setup_for_real_optimizer",
        lambda self: setattr(self, "was_on", self.device),
    )
    optimizer = made(gradient_accumulation_dtype=BF16, device="meta")
    optimizer._setup_for_real_optimizer()
    assert (optimizer.was_on, optimizer.device) == ("meta", "cpu")
    buffer = optimizer.grad_partitions_flat_buffer
    assert (buffer.numel(), buffer.dtype, buffer.device) == (0, BF16, CPU)


@pytest.mark.parametrize("accumulate", ["host", "device"])
@pytest.mark.parametrize("offload_param", [False, True])
def test_sub_groups_in_host_memory_are_partitions(monkeypatch, accumulate, offload_param):
    asked, opened, pinned = [], [], []

    class Partitions:
        gradients = "gradients"

        def __init__(self, partitions, **named):
            opened.append((partitions, named))

        def pin(self, buffer):
            pinned.append(buffer)

    monkeypatch.setattr(stage_3, "Partitions", Partitions)
    monkeypatch.setattr(
        stage_3, "swapped_on", lambda volume, params, _: asked.append((volume, params)) or "volume"
    )
    operands = mock.Mock(moments_bytes=lambda shape: 8 * shape.numel())
    options = SimpleNamespace(threads=3, host_bytes_max=1000, accumulate=accumulate)
    params = [parameter(0), parameter(1, numel=2)]
    weights = [torch.ones(each.numel(), dtype=BF16) for each in params]
    masters = [torch.ones(4), torch.empty(0)]
    optimizer = made(
        fp32_partitioned_groups_flat=masters,
        fp16_partitioned_groups_flat=weights,
        partial_offload=0.5,
        gradient_accumulation_dtype=FP32,
        gradient_accumulation_steps=5,
        offload_param=offload_param,
        param_names={params[0]: "first", params[1]: "second"},
        fp16_groups=[[params[0]], [params[1]]],
        optimizer="base",
        _plan=SimpleNamespace(options=options, volume="asked", is_pinned="pinned"),
        _operands=operands,
        _weight_buffers=["buffer"],
    )
    optimizer.initialize_optimizer_states()
    assert (0 in optimizer._share, 1 in optimizer._share) == (True, False)
    assert asked == [("asked", [[("first", (4,))], [("second", (2,))]])]
    (((first, second), named),) = opened
    assert named == {
        "swapped": "volume",
        "device": CPU,
        "threads": 3,
        "host_bytes_max": 1000,
        "is_pinned": "pinned",
        "adds_on_host": accumulate == "host",
        "accumulation_steps": 5,
    }
    # Nothing of a sub-group on the device.
    assert [first.master.numel(), first.weight.numel(), first.moments_bytes] == [0, 0, 0]
    assert first.is_offloaded is False
    assert second.master is masters[1]
    assert second.weight is weights[1]
    assert second[2:] == (FP32, 16, offload_param)
    assert first.grad_dtype == FP32
    assert optimizer._partitions.are_weights_read_elsewhere is not offload_param
    assert operands.forget_unused_volume.called
    assert (pinned, optimizer._weight_buffers) == (["buffer"], [])
    assert [home._master for home in optimizer.stepwell_homes] == masters
    assert optimizer.device == torch.device("meta")


@pytest.mark.parametrize("count", [0, 2])
def test_all_that_was_gathered_is_released_and_gathered_again(count):
    calls = []
    first = SimpleNamespace(all_gather=lambda params: calls.append(len(params)))
    optimizer = made(
        fp16_groups=[None, None],
        _unflatten_partitioned_parameters=calls.append,
        _partition_all_parameters=noted(calls, "released"),
        persistent_parameters=[first, "second"][:count],
    )
    optimizer._release_and_gather()
    assert calls == [0, 1, "released", *([2] if count else [])]


def test_committed_steps_are_counted_behind_the_last_step():
    volume = SimpleNamespace(committed_steps=1)
    optimizer = made(
        _operands=SimpleNamespace(swapped=volume),
        _partitions=SimpleNamespace(
            finish=lambda: setattr(volume, "committed_steps", 2), timing=lambda: "timing"
        ),
    )
    assert optimizer.committed_steps == 2
    optimizer._operands.swapped = None
    assert optimizer.committed_steps is None
    assert optimizer.timing == "timing"


def test_an_end_waits_for_what_goes_up(monkeypatch):
    calls = []
    monkeypatch.setattr(DeepSpeedZeroOptimizer_Stage3, "destroy", noted(calls, "theirs"))
    optimizer = made(
        _persistent=SimpleNamespace(end=noted(calls, "persistent")),
        _partitions=SimpleNamespace(end=noted(calls, "ended")),
        _share=SimpleNamespace(end=noted(calls, "share")),
    )
    optimizer.destroy()
    assert calls == ["persistent", "ended", "share", "theirs"]
