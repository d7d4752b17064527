"""Methods of ZeRO-1's and -2's optimizer, each by itself: what is made, and gradients.

Stand-ins take the place of the rest. All need DeepSpeed, which stays in a process that has used it:
`test_deepspeed_stages.py` runs them in one of their own, and `mutants.py` does.
"""

import math
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from deepspeed.runtime.zero.offload_config import DeepSpeedZeroOffloadOptimizerConfig
from deepspeed.runtime.zero.stage_1_and_2 import INITIAL_MICRO_STEP_ID, DeepSpeedZeroOptimizer
from stand_in_optimizers import (
    Timers,
    backward_of,
    noted,
    optimizer_of,
    partitions_of,
    several,
)
from stepwell.deepspeed.zero import stage_1_2
from stepwell.deepspeed.zero.fragment import Fragment
from stepwell.deepspeed.zero.norm_round import NormRound
from stepwell.deepspeed.zero.stage_1_2 import OffloadZeroOptimizer

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


def made(**fields):
    return optimizer_of(OffloadZeroOptimizer, fields)


# ---- what is made ----


@pytest.mark.parametrize("zenflow", [None, "deferred"])
@pytest.mark.parametrize("gate", ["module", "step"])
@pytest.mark.parametrize("is_alone", [False, True])
def test_several_ranks_gather_behind_a_step_that_is_not_waited_for(
    monkeypatch, gate, is_alone, zenflow
):
    several(monkeypatch, stage_1_2.dist)
    given, opened, asked = [], [], []
    device = torch.device("cpu")

    def begin(self, init_optimizer, *, offload_optimizer_config):
        given.append(offload_optimizer_config)
        self._is_alone, self.dp_process_group = is_alone, "ranks"
        self._partitions = SimpleNamespace(device=device)
        self.bit16_groups, self.bit16_groups_flat = "groups", [torch.zeros(3)]

    monkeypatch.setattr(DeepSpeedZeroOptimizer, "__init__", begin)

    def peers(group, **options):
        asked.append(options)
        return SimpleNamespace(open_data=lambda where: opened.append((group, where)))

    monkeypatch.setattr(stage_1_2, "Peers", peers)
    monkeypatch.setattr(stage_1_2, "GatheredWeights", lambda *arguments: arguments)
    monkeypatch.setattr(stage_1_2, "ToldSteps", lambda peers: ("told", peers))
    optimizer = OffloadZeroOptimizer(
        None,
        plan=SimpleNamespace(gate=gate, zenflow=zenflow),
        offload_optimizer_config=DeepSpeedZeroOffloadOptimizerConfig(
            device="nvme", pin_memory=True
        ),
    )
    # The engine pins, and DeepSpeed's swapper knows nothing of a volume.
    assert [(each.pin_memory, each.device) for each in given] == [(False, "cpu")]
    gathers_behind = gate == "module" and zenflow is None
    options = {"gathers": gathers_behind, "instead": '"stepwell": {"engine": false}'}
    assert asked == ([] if is_alone else [options])
    if gathers_behind and not is_alone:
        assert opened == [("ranks", device)]
        assert optimizer._gathers[0] is optimizer._partitions
        assert optimizer._gathers[2] == "groups"
    else:
        assert (optimizer._gathers, opened) == (None, [])
    assert (optimizer._told_steps is not None) == (not is_alone and not gathers_behind)
    assert optimizer._operands._rank == 1
    optimizer._backward.check()
    optimizer.bit16_groups = [[torch.nn.Parameter(torch.zeros(3))]]
    assert optimizer._exposed() == []


def test_masters_are_those_that_were_set_until_they_have_homes():
    optimizer = made(stepwell_homes=[])
    masters = [torch.zeros(1)]
    optimizer.single_partition_of_fp32_groups = masters
    assert optimizer.single_partition_of_fp32_groups is masters
    optimizer.stepwell_homes = [SimpleNamespace(master=lambda: "after the step")]
    assert optimizer.single_partition_of_fp32_groups == ["after the step"]


def test_while_masters_are_made_they_have_no_memory():
    optimizer = made()
    optimizer.device = "cpu"
    assert optimizer.device == torch.device("meta")
    optimizer._partitions = None
    assert optimizer.device == "cpu"


def test_state_is_that_behind_the_last_step():
    base = SimpleNamespace(state="before")
    optimizer = made(optimizer=base)
    optimizer.synchronize = lambda: setattr(base, "state", "after")
    assert optimizer.state == "after"
    # A step that ends later would bring its own.
    base.state = "before"
    optimizer.state = "set"
    assert base.state == "set"
    optimizer.synchronize = mock.Mock(side_effect=OSError)
    with pytest.raises(OSError):
        optimizer.state = "not set"
    assert base.state == "set"


def test_committed_steps_are_counted_behind_the_last_step():
    volume = SimpleNamespace(committed_steps=1)
    optimizer = made(_operands=SimpleNamespace(swapped=volume))
    optimizer.synchronize = lambda: setattr(volume, "committed_steps", 2)
    assert optimizer.committed_steps == 2
    optimizer._operands.swapped = None
    assert optimizer.committed_steps is None


def test_a_rank_has_its_own_part_of_each_group(monkeypatch):
    monkeypatch.setattr(stage_1_2.dist, "get_rank", lambda group: group)
    optimizer = made(
        real_dp_process_group=[1, 0], parallel_partitioned_bit16_groups=[["a", "b"], ["c", "d"]]
    )
    assert optimizer._weights() == ["b", "c"]


def initialized(monkeypatch, *, world_size=1, is_resumed=False, sums_apart=(False, False), **more):
    """An optimizer of two groups, the second of one element, after what makes its state."""
    several(monkeypatch, stage_1_2.dist, world_size=world_size, rank=0)
    opened, calls = [], []
    weights = [torch.arange(4.0, dtype=BF16), torch.ones(1, dtype=BF16)]
    operands = mock.Mock(moments_bytes=lambda shape: 8 * shape.numel(), swapped="none yet")
    partitions = SimpleNamespace(resumed={0: 3})

    def open_partitions(self, found):
        assert self._operands.swapped == "volume"
        opened.extend(found)
        return partitions

    monkeypatch.setattr(OffloadZeroOptimizer, "_open_partitions", open_partitions)
    monkeypatch.setattr(
        stage_1_2, "swapped_on", lambda volume, params, _: params if volume is None else volume
    )
    params = [torch.nn.Parameter(torch.zeros(2, 2)), torch.nn.Parameter(torch.zeros(1))]
    fields = {
        "dp_process_group": "ranks",
        "real_dp_process_group": ["ranks", "ranks"],
        "parallel_partitioned_bit16_groups": [[each] for each in weights],
        "_masters": [torch.empty(each.numel(), device="meta") for each in weights],
        "optimizer": SimpleNamespace(param_groups=[{"params": []}, {"params": []}], state={}),
        "temp_grad_buffer_for_cpu_offload": torch.zeros(9),
        "_operands": operands,
        "_plan": SimpleNamespace(volume="volume", is_resumed=is_resumed),
        "_use_compact_grad_partition_buffer": lambda group: sums_apart[group],
        "sequence_parallel_size": 1,
        "communication_data_type": BF16,
        "dtype": BF16,
        "gradient_predivide_factor": 1.0,
        "gradient_accumulation_dtype": FP32,
        "use_grad_accum_attribute": False,
        "param_names": {params[0]: "first", params[1]: "second"},
        "round_robin_bit16_groups": [[params[0]], [params[1]]],
        "_gather_weights": noted(calls, "gathered"),
        **more,
    }
    optimizer = made(**fields)
    optimizer.initialize_optimizer_states()
    return optimizer, opened, calls


def test_masters_begin_as_the_weights(monkeypatch):
    optimizer, (first, second), calls = initialized(monkeypatch)
    for each, weight in zip((first, second), optimizer._weights(), strict=True):
        assert each.weight is weight
        assert (each.master.numel(), each.master.dtype, each.is_offloaded) == (0, FP32, False)
    assert [first.moments_bytes, second.moments_bytes] == [32, 8]
    assert [group["params"] for group in optimizer.optimizer.param_groups] == [
        [first.master],
        [second.master],
    ]
    assert [home._master for home in optimizer.stepwell_homes] == [first.master, second.master]
    # DeepSpeed's buffers for what crosses the bus are gone.
    assert optimizer.temp_grad_buffer_for_cpu_offload is None
    assert optimizer._operands.forget_unused_volume.called
    assert not optimizer._operands.resume.called
    assert calls == []


def test_ranks_gather_what_a_volume_has_brought(monkeypatch):
    optimizer, (first, second), calls = initialized(monkeypatch, is_resumed=True)
    ((counts, masters), _) = optimizer._operands.resume.call_args
    assert (counts, masters) == ({0: 3}, [first.master, second.master])
    assert calls == ["gathered"]


def test_a_volume_is_of_parameters_by_name_and_shape(monkeypatch):
    asked = []

    def swapped_on(volume, params, new_state):
        asked.append((volume, params))
        return "volume"

    monkeypatch.setattr(
        OffloadZeroOptimizer, "_open_partitions", lambda *_: SimpleNamespace(resumed={})
    )
    several(monkeypatch, stage_1_2.dist, world_size=1, rank=0)
    optimizer, _, _ = initialized(monkeypatch)
    monkeypatch.setattr(stage_1_2, "swapped_on", swapped_on)
    optimizer.initialize_optimizer_states()
    assert asked == [("volume", [[("first", (2, 2))], [("second", (1,))]])]


@pytest.mark.parametrize(
    ("fields", "is_unreduced"),
    [
        ({}, True),
        ({"communication_data_type": FP32}, True),
        ({"communication_data_type": FP16}, False),
        ({"world_size": 2}, False),
        ({"sequence_parallel_size": 2}, False),
        ({"sums_apart": (False, True)}, False),
        ({"gradient_predivide_factor": 2.0}, False),
    ],
)
def test_gradients_go_to_no_bucket_where_a_reduction_changes_nothing(
    monkeypatch, fields, is_unreduced
):
    optimizer, _, _ = initialized(monkeypatch, **fields)
    assert optimizer._is_unreduced is is_unreduced
    assert optimizer._is_alone is ("world_size" not in fields)


@pytest.mark.parametrize(
    ("fields", "dtypes"),
    [
        ({}, [BF16, BF16]),
        ({"sums_apart": (True, False)}, [FP32, BF16]),
        ({"use_grad_accum_attribute": True}, [FP32, FP32]),
    ],
)
def test_gradients_have_the_dtype_of_their_sums(monkeypatch, fields, dtypes):
    _, opened, _ = initialized(monkeypatch, **fields)
    assert [each.grad_dtype for each in opened] == dtypes


@pytest.mark.parametrize("partition_gradients", [False, True])
@pytest.mark.parametrize("accumulate", ["host", "device"])
def test_partitions_have_the_options_of_the_plan(monkeypatch, partition_gradients, accumulate):
    monkeypatch.setattr(stage_1_2, "Partitions", lambda *arguments, **named: (arguments, named))
    options = SimpleNamespace(threads=3, host_bytes_max=1000, accumulate=accumulate)
    optimizer = made(
        _plan=SimpleNamespace(options=options, is_pinned=False),
        _operands=SimpleNamespace(swapped="volume"),
        partition_gradients=partition_gradients,
        gradient_accumulation_steps=5,
    )
    partitions = [SimpleNamespace(weight=torch.zeros(1)), SimpleNamespace(weight=None)]
    assert optimizer._open_partitions(partitions) == (
        (partitions,),
        {
            "device": torch.device("cpu"),
            "swapped": "volume",
            "threads": 3,
            "host_bytes_max": 1000,
            "is_pinned": False,
            "adds_on_host": partition_gradients and accumulate == "host",
            "accumulation_steps": 5,
        },
    )


# ---- backwards ----


@pytest.mark.parametrize(
    ("name", "arguments", "expected"),
    [
        ("scale_if_loss", ["loss"], ["announce", "theirs"]),
        ("clear_backward_seen_flag", [], ["note_forward", "theirs"]),
        ("backward_prologue", [], ["begin", "let_go", "theirs"]),
        ("process_gradients", ["param", 0], ["note_gradient", "theirs"]),
        ("backward_epilogue", [], ["theirs", "end"]),
    ],
)
def test_what_a_backward_tells(monkeypatch, name, arguments, expected):
    calls = []
    monkeypatch.setattr(DeepSpeedZeroOptimizer, name, noted(calls, "theirs", "returned"))
    optimizer = made(
        _backward=backward_of(calls), _partitions=SimpleNamespace(let_go=noted(calls, "let_go"))
    )
    returned = getattr(optimizer, name)(*arguments)
    assert calls == expected
    assert returned == ("returned" if name == "scale_if_loss" else None)


@pytest.mark.parametrize("is_any_complete", [False, True])
@pytest.mark.parametrize("is_cleared", [False, True])
def test_a_backward_drops_what_was_left_out(monkeypatch, is_cleared, is_any_complete):
    calls = []
    monkeypatch.setattr(DeepSpeedZeroOptimizer, "backward_prologue", noted(calls, "theirs"))
    optimizer = made(
        _backward=backward_of([], is_cleared=is_cleared),
        _partitions=partitions_of(calls, is_any_complete=is_any_complete),
        micro_step_id=3,
        _offload_accumulated_param_ids={1},
    )
    optimizer._release_sums = noted(calls, "sums")
    optimizer.backward_prologue()
    is_dropped = is_cleared and is_any_complete
    assert calls == [*(["dropped", "sums"] if is_dropped else []), "let_go", "theirs"]
    assert optimizer.micro_step_id == (INITIAL_MICRO_STEP_ID if is_dropped else 3)
    assert optimizer._offload_accumulated_param_ids == (set() if is_dropped else {1})


@pytest.mark.parametrize("is_unended", [False, True])
def test_zero_grad_behind_a_failed_backward_drops_all(monkeypatch, is_unended):
    calls = []
    monkeypatch.setattr(
        DeepSpeedZeroOptimizer, "zero_grad", lambda _, set_to_none: calls.append(set_to_none)
    )
    backward = SimpleNamespace(is_unended=is_unended, note_cleared=noted(calls, "cleared"))
    optimizer = made(_backward=backward, timers=Timers())
    optimizer._drop_gradients = noted(calls, "dropped")
    optimizer.timers("backward").start()
    optimizer.zero_grad(set_to_none=False)
    optimizer.zero_grad()
    dropped = ["dropped"] if is_unended else []
    assert calls == ["cleared", *(dropped or [False]), "cleared", *(dropped or [True])]
    assert optimizer.timers.running == ([] if is_unended else ["backward"])


def test_micro_batches_are_counted_without_buckets(monkeypatch):
    calls = []
    monkeypatch.setattr(DeepSpeedZeroOptimizer, "setup_buckets", noted(calls, "theirs"))
    optimizer = made(_is_unreduced=True, ready_for_gradients=False, micro_step_id=-1)
    for _ in range(2):
        optimizer.setup_buckets()
        assert (optimizer.micro_step_id, optimizer.ready_for_gradients) == (0, True)
    assert calls == []
    optimizer._is_unreduced = False
    optimizer.setup_buckets()
    assert (calls, optimizer.micro_step_id) == (["theirs"], 0)


def test_a_gradient_that_is_not_reduced_is_copied_once_it_is_ready(monkeypatch):
    theirs, copied, reduced = [], [], []
    monkeypatch.setattr(
        DeepSpeedZeroOptimizer,
        "reduce_independent_p_g_buckets_and_remove_grads",
        lambda _, *arguments: theirs.append(arguments),
    )
    monkeypatch.setattr(
        DeepSpeedZeroOptimizer, "reduce_ipg_grads", lambda _, comm_dtype: reduced.append(comm_dtype)
    )
    optimizer = made(
        _is_unreduced=True, copy_grads_in_partition=lambda *arguments: copied.append(arguments)
    )
    reduce = optimizer.reduce_independent_p_g_buckets_and_remove_grads
    plain, ready, early, empty = (torch.zeros(numel) for numel in (1, 2, 2, 0))
    ready.ds_grad_is_ready, early.ds_grad_is_ready = True, False
    for number, param in enumerate((plain, ready, early, empty)):
        reduce(param, number)
    optimizer.reduce_ipg_grads(FP32)
    assert [number for _, number in copied] == [0, 1]
    assert copied[0][0] is plain
    assert theirs == reduced == []
    optimizer._is_unreduced = False
    reduce(early, 3)
    optimizer.reduce_ipg_grads(FP32)
    assert (theirs, reduced) == ([(early, 3)], [FP32])
    assert len(copied) == 2


@pytest.mark.parametrize(("overlap_comm", "kind"), [(True, "cuda"), (True, "cpu"), (False, "cuda")])
def test_the_end_of_a_backward_waits_for_reductions_on_the_device_alone(
    monkeypatch, overlap_comm, kind
):
    calls = []
    monkeypatch.setattr(
        DeepSpeedZeroOptimizer, "independent_gradient_partition_epilogue", noted(calls, "theirs")
    )
    stream = SimpleNamespace(wait_stream=lambda other: calls.append(f"waits for {other}"))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: stream)
    names = ("reduce_ipg_grads", "_clear_previous_reduced_grads", "_release_ipg_buffers")
    optimizer = made(
        overlap_comm=overlap_comm,
        reduction_stream="reductions",
        params_already_reduced=[True, False, True],
        _backward_hook_state=SimpleNamespace(epilogue_ran_this_backward=False),
        _partitions=SimpleNamespace(device=torch.device(kind)),
        _clear_param_grad_only=noted(calls, "grads"),
        **{name: noted(calls, name) for name in names},
    )
    optimizer.independent_gradient_partition_epilogue()
    if not overlap_comm or kind == "cpu":
        assert calls == ["theirs"]
        return
    # Memory is freed behind the wait.
    assert calls == [names[0], "waits for reductions", *names[1:], "grads"]
    assert optimizer.params_already_reduced == [False] * 3
    assert optimizer._backward_hook_state.epilogue_ran_this_backward


@pytest.mark.parametrize("is_last", [False, True])
@pytest.mark.parametrize("is_unreduced", [False, True])
def test_the_part_of_this_rank_is_collected(is_last, is_unreduced):
    gradients, cleared = mock.Mock(), []
    param = torch.nn.Parameter(torch.zeros(2, 3))
    grad = torch.arange(6.0).view(2, 3)
    optimizer = made(
        param_id={id(param): 7},
        grad_position={7: (1, 2, 10, 3)},
        _is_unreduced=is_unreduced,
        _partitions=SimpleNamespace(gradients=gradients),
        is_gradient_accumulation_boundary=lambda: is_last,
        _use_compact_grad_partition_buffer=lambda group: False,
        get_param_gradient_attribute=lambda _: grad,
        clear_grad_attribute=cleared.append,
    )
    optimizer.copy_grads_in_partition(param)
    (((fragment, piece), options),) = gradients.collect.call_args_list
    assert fragment == Fragment(1, 10, 3)
    assert piece.tolist() == [2, 3, 4]
    assert options == {"is_owned": is_unreduced, "is_last": is_last}
    assert len(cleared) == 1
    assert not gradients.add.called


@pytest.mark.parametrize("is_last", [False, True])
def test_a_sum_of_deepspeeds_is_sent_with_its_last_gradient(monkeypatch, is_last):
    monkeypatch.setattr(stage_1_2.dist, "get_rank", lambda group: group)
    gradients, cleared = mock.Mock(), []
    param = torch.nn.Parameter(torch.zeros(6))
    optimizer = made(
        param_id={id(param): 7},
        grad_position={7: (1, 2, 10, 3)},
        real_dp_process_group=[4, 5],
        _partitions=SimpleNamespace(gradients=gradients),
        is_gradient_accumulation_boundary=lambda: is_last,
        _use_compact_grad_partition_buffer=lambda group: group == 1,
        _get_compact_grad_partition_slice=lambda *arguments: arguments,
        clear_grad_attribute=cleared.append,
    )
    optimizer.copy_grads_in_partition(param)
    total = mock.call.add(Fragment(1, 10, 3), (1, 5, 7, 3), is_owned=True, is_total=True)
    sent = mock.call.send(Fragment(1, 10, 3))
    assert gradients.mock_calls == ([total, sent] if is_last else [total])
    assert len(cleared) == 1


# ---- norms ----


@pytest.mark.parametrize("gathers", [None, "gathers"])
def test_the_norm_is_of_all_gradients_at_the_end_of_an_accumulation(gathers):
    calls = []
    optimizer = made(
        is_gradient_accumulation_boundary=lambda: True,
        _check_used=noted(calls, "check_used"),
        _gathers=gathers,
        _is_alone=True,
        _norm_round=NormRound(),
        _partitions=SimpleNamespace(
            gradients=SimpleNamespace(norm=lambda add_up: 3.0), device=torch.device("cpu")
        ),
    )
    optimizer.synchronize = noted(calls, "synchronized")
    norm = optimizer.scaled_global_norm()
    expected = ["check_used"] if gathers is None else ["synchronized", "check_used"]
    assert (norm.item(), norm.shape, calls) == (3.0, (), expected)
    optimizer.is_gradient_accumulation_boundary = lambda: False
    assert optimizer.scaled_global_norm(2).item() == 0.0
    assert calls == expected
    with pytest.raises(ValueError, match="`norm_type` is `1`, expected 2"):
        optimizer.scaled_global_norm(1)


def test_parameters_without_gradient_are_named():
    params = [torch.nn.Parameter(torch.zeros(1)) for _ in range(6)]
    used = {Fragment(0, 0, 1)}
    optimizer = made(
        ignore_unused_parameters=False,
        params_in_partition=[params[:3], params[3:]],
        param_names={param: f"weight {nth}" for nth, param in enumerate(params[:4])},
        param_id={id(param): nth for nth, param in enumerate(params)},
        grad_position={nth: (nth // 3, 0, nth, 1) for nth in range(6)},
        _partitions=SimpleNamespace(gradients=SimpleNamespace(has_gradient=used.__contains__)),
    )
    named = r"5 parameters got no gradient: `weight 1`, `weight 2`, `weight 3`, `\?`; nothing"
    with pytest.raises(AssertionError, match=named):
        optimizer._check_used()
    optimizer.ignore_unused_parameters = True
    optimizer._check_used()
    optimizer.ignore_unused_parameters = False
    used |= {optimizer._fragment(param) for param in params}
    optimizer._check_used()


@pytest.mark.parametrize(("is_alone", "expected"), [(True, 3.0), (False, 6.0)])
def test_squares_are_those_of_all_ranks(monkeypatch, is_alone, expected):
    several(monkeypatch, stage_1_2.dist)
    optimizer = made(
        local_overflow=False,
        _is_alone=is_alone,
        dp_process_group="ranks",
        _norm_round=NormRound(),
    )
    assert optimizer._add_up(torch.tensor(3.0)) == expected
    optimizer.local_overflow = True
    assert optimizer._add_up(torch.tensor(3.0)) == math.inf


def test_a_rank_that_cannot_step_ends_the_step_of_the_others(monkeypatch):
    several(monkeypatch, stage_1_2.dist)
    monkeypatch.setattr(
        stage_1_2.dist, "all_reduce", lambda sums, op, group: sums.add_(torch.tensor([2.0, 1.0]))
    )
    optimizer = made(
        local_overflow=False,
        _is_alone=False,
        dp_process_group="ranks",
        _norm_round=NormRound(),
        _check_used=mock.Mock(side_effect=ValueError("mine")),
        _partitions=SimpleNamespace(device=torch.device("cpu")),
    )
    with pytest.raises(OSError, match=r"cannot take this step: 1, so none .* hint: "):
        optimizer._add_up(torch.tensor(3.0))
    # This one cannot, either.
    with pytest.raises(ValueError, match="mine"):
        optimizer._norm()


def test_a_skipped_step_drops_gradients_and_has_its_timers():
    calls = []
    optimizer = made(
        _drop_gradients=noted(calls, "dropped"),
        timers=Timers(),
    )
    optimizer._skip()
    assert calls == ["dropped"]
    # DeepSpeed's engine asks for them.
    assert optimizer.timers.ended == ["optimizer_step", "optimizer_allgather"]


def test_nothing_is_left_of_gradients_that_are_dropped(monkeypatch):
    calls = []
    monkeypatch.setattr(
        DeepSpeedZeroOptimizer, "zero_grad", lambda _, set_to_none: calls.append(set_to_none)
    )
    bucket = SimpleNamespace(clear=noted(calls, "bucket"))
    reset = noted(calls, "reset")
    optimizer = made(
        _partitions=SimpleNamespace(drop=noted(calls, "dropped")),
        _masters=[None, None],
        _release_preflattened_grad_buffers=lambda group: calls.append(group),
        averaged_gradients={0: "sum", 1: "sum"},
        local_overflow=True,
        ipg_buckets={BF16: bucket},
        extra_large_param_to_reduce={BF16: "param"},
        previous_reduced_grads={BF16: ["param"]},
        params_already_reduced=[True, False, True],
        _release_ipg_buffers=noted(calls, "buffers"),
        micro_step_id=4,
        _offload_accumulated_param_ids={7},
        _backward=SimpleNamespace(reset=reset),
        _backward_hook_state=SimpleNamespace(backward_active_depth=2),
    )
    reduced = optimizer.params_already_reduced
    optimizer._drop_gradients()
    assert calls == ["dropped", 0, 1, True, "bucket", "buffers", "reset"]
    assert optimizer.averaged_gradients == {0: None, 1: None}
    assert optimizer.local_overflow is False
    assert optimizer.extra_large_param_to_reduce == {}
    assert optimizer.previous_reduced_grads == {BF16: []}
    assert optimizer.params_already_reduced is reduced == [False] * 3
    assert optimizer.micro_step_id == stage_1_2.INITIAL_MICRO_STEP_ID
    assert optimizer._offload_accumulated_param_ids == set()
    assert optimizer._backward_active_depth == 0
