"""Short runs of ZeRO on the offload engine in the process of the tests: for `mutants.py`.

The tests of ZeRO run whole programs in processes of their own, which takes longer than a mutant
may. Here each test is a run or two of those programs on one rank, against DeepSpeed's own path or
against what the whole tests expect. pytest does not collect this file by itself: DeepSpeed stays in
a process that has used it.

Here are steps and what programs do beside them. Where weights and state are is varied in
`zero_in_process_memory.py`, and when steps end in `zero_in_process_late.py`.
"""

import math

import deepspeed_access_programs as accesses
import deepspeed_checkpoint_programs as checkpoints
import deepspeed_gradient_programs as gradients
import deepspeed_offload_access_programs as offload_access
import deepspeed_offload_programs as offload
import deepspeed_torch_adam_programs as torch_adam
import deepspeed_training_programs as training
import deepspeed_weight_programs as weights
import pytest
import test_deepspeed_checkpoints
import test_deepspeed_gradients
import test_deepspeed_offload
import test_deepspeed_offload_access
import test_deepspeed_torch_adam
import test_deepspeed_training
import torch
from deepspeed_asserts import assert_same_partitions, assert_same_runs, assert_same_values
from deepspeed_engines import configuration, initialize, partitions, perceptron, train, vectors
from deepspeed_engines import squared as loss_of
from deepspeed_paths import Forked, both, grown, poisoned, with_experts
from zero_one_rank import ENGINES, ON_DEVICE, assert_resumed_by_both, on_both, one_rank  # noqa: F401

# The programs run without pytest's.
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")
FP32_SUMS = {"gradient_accumulation_steps": 2, "data_types": {"grad_accum_dtype": "fp32"}}


@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"gradient_accumulation_steps": 2},
        FP32_SUMS,
        ON_DEVICE,
        {"dtype": "fp32"},
        {"stepwell": {"gate": "step"}},
        {"zero": {"sub_group_size": 3000, "overlap_comm": True}},
    ],
)
def test_both_paths_are_the_same_run(stage, options):
    assert_same_runs(*both(configuration(stage=stage, **{"dtype": "bf16", **options}), steps=3))


@pytest.mark.parametrize("stage", [1, 2])
def test_clipped(stage):
    assert_same_runs(*both(configuration(stage=stage, dtype="bf16", clip=0.1), steps=3))


@pytest.mark.parametrize("stage", [2, 3])
def test_loss_scale(stage):
    scale = {"initial_scale_power": 24, "hysteresis": 1, "loss_scale_window": 1000}
    config = configuration(dtype="fp16", stage=stage, precision=scale)
    ours, theirs = both(config, steps=16)
    assert_same_runs(ours, theirs)
    assert ours["skipped"] > 0


def test_groups():
    ours, theirs = on_both(offload.with_groups, configuration(dtype="bf16"))
    assert ours["losses"] == theirs["losses"]
    assert_same_partitions(ours["partitions"], theirs["partitions"])


@pytest.mark.parametrize("stage", [2, 3])
@pytest.mark.parametrize("options", [{}, {"gradient_accumulation_steps": 2}])
def test_nonfinite(stage, options):
    run = poisoned(configuration(dtype="bf16", stage=stage, clip=1.0, **options))
    assert (run["norm"], run["skipped"], run["steps"]) == (math.inf, 1, [5])
    (before, kept), (after, kept_after) = run["before"], run["after"]
    assert_same_partitions(before, after)
    assert all(torch.equal(one, other) for one, other in zip(kept, kept_after, strict=True))
    assert torch.tensor(run["losses"]).isfinite().all()


@pytest.mark.parametrize("stage", [2, 3])
def test_what_the_device_holds(stage):
    numel = 32 * 64 + 64 + 64 * 32 + 32
    assert offload.held("host", stage) == [0, 0, 0]
    assert offload.held("device", stage) == [numel, numel, 0]


def test_forwards_wait_for_their_own_weights():
    calls, is_new = offload.waited()
    assert [sorted(call) for call in calls] == [
        [(0, 0, 2048), (0, 2048, 64)],
        [(0, 2112, 2048), (0, 4160, 32)],
    ]
    assert is_new


# ---- gradients ----


@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize(
    "options",
    [{}, {"gradient_accumulation_steps": 2}, FP32_SUMS, {"wall_clock_breakdown": True}],
)
def test_failed_backwards(stage, options):
    config = configuration(stage=stage, dtype="bf16", **options)
    expected = gradients.recovered(dict(config), ())
    found = gradients.recovered(config, (0, 2 * options.get("gradient_accumulation_steps", 1)))
    assert found[0] == expected[0]
    assert_same_partitions(found[1], expected[1])


@pytest.mark.parametrize("after", ["step", "backward", "plain backward"])
@pytest.mark.parametrize("stage", [2, 3])
def test_what_follows_a_failed_backward(stage, after):
    assert gradients.unrecovered(stage, after).startswith("a backward has not ended")


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_cleared(stage):
    config = configuration(stage=stage, dtype="bf16", gradient_accumulation_steps=3)
    ours, theirs = on_both(gradients.cleared, config)
    assert ours[0] == theirs[0]


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_skipped(stage):
    assert not gradients.skipped(stage).any()


@pytest.mark.parametrize("stage", [2, 3])
def test_huge(stage):
    config = configuration(stage=stage, clip=0.1)
    plain, found = (gradients.huge(dict(config), factor) for factor in (1.0, 2.0**80))
    assert found["skipped"] == 0
    assert math.isclose(found["norm"], plain["norm"] * 2.0**80, rel_tol=1e-6)
    for (_, state), (_, expected) in zip(found["after"], plain["after"], strict=True):
        torch.testing.assert_close(state["exp_avg"], expected["exp_avg"], rtol=1e-4, atol=1e-9)


@pytest.mark.parametrize("stage", [1, 2])
def test_refused(stage):
    config = configuration(dtype="bf16", stage=stage)
    ours, theirs = (gradients.refused(dict(config), block) for block in ENGINES)
    assert "a gradient is not finite; nothing was changed. hint: " in ours["message"]
    assert_same_partitions(ours["before"], ours["after"])
    assert ours["losses"] == theirs["losses"]


@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("is_timed", [False, True])
def test_without_memory(stage, is_timed):
    found, expected = (
        gradients.without_memory(stage, is_refused=each, wall_clock_breakdown=is_timed)
        for each in (True, False)
    )
    assert found[0] == expected[0]
    assert_same_partitions(found[1], expected[1])


@pytest.mark.parametrize("is_scattered", [False, True])
def test_handed_over(is_scattered):
    run = gradients.handed_over(zero={"reduce_scatter": is_scattered})
    runs = {"handed over": {is_scattered: run}}
    for test in (
        test_deepspeed_gradients.test_what_is_kept_of_gradients_is_no_memory_that_is_reduced,
        test_deepspeed_gradients.test_gradients_by_sub_group_are_those_of_parameters,
    ):
        test(runs, is_scattered)


@pytest.mark.parametrize("stage", [1, 2])
def test_interrupted(stage):
    found, expected = (gradients.interrupted(stage, is_interrupted=each) for each in (True, False))
    assert found[0] == expected[0]
    assert_same_partitions(found[1], expected[1])


def test_no_gradient_is_a_gradient_of_zeros():
    from deepspeed import utils

    (batch,) = vectors(1)
    engine = initialize(Forked(), configuration(dtype="fp32", params={"betas": [0.5, 0.5]}))
    moments = []
    for _ in range(2):
        train(engine, [batch], loss_of)
        moment = utils.safe_get_full_optimizer_state(engine.module.second.weight, "exp_avg")
        moments.append(moment.clone())
    assert moments[0].any()
    assert torch.equal(moments[1], moments[0] / 2)


def test_two_backwards():
    engine = initialize(perceptron(), configuration(dtype="fp32"))
    model = perceptron()
    for batch in vectors(2):
        engine.backward(loss_of(engine, batch))
        loss_of(model, batch).backward()
    engine.step()
    ((_, state),) = partitions(engine)
    summed = torch.cat([param.grad.flatten() for param in model.parameters()])
    moment = state["exp_avg"][: summed.numel()]
    torch.testing.assert_close(moment, 0.1 * summed, rtol=1e-5, atol=1e-8)


# ---- what programs read and write ----


@pytest.mark.parametrize("stage", [2, 3])
@pytest.mark.parametrize(
    ("run", "options"),
    [
        (accesses.read, {"dtype": "bf16", "clip": 0.01}),
        (accesses.read, {"dtype": "fp16", "precision": {"loss_scale": 1024.0}, "clip": 0.01}),
        (accesses.set_gradients, {"dtype": "bf16"}),
        (accesses.set_early, {"dtype": "bf16", "gradient_accumulation_steps": 2}),
        (accesses.set_early, {"dtype": "bf16", **ON_DEVICE}),
        (accesses.set_state, {"dtype": "bf16"}),
        (accesses.set_state, {"dtype": "bf16", "optimizer": "StepwellAdamW"}),
        (accesses.poisoned, {"dtype": "bf16", "precision": {"check_grad_overflow": False}}),
    ],
)
def test_accesses(stage, run, options):
    rtol = 1e-6 if run is accesses.read and stage == 3 else 0.0
    assert_same_values(*on_both(run, configuration(stage=stage, **options)), rtol=rtol)


@pytest.mark.parametrize("options", [{"clip": 0.1}, {"gradient_accumulation_steps": 2}])
def test_gradients_that_are_set(options):
    config = configuration(dtype="bf16", **options)
    assert_same_values(*on_both(accesses.set_gradients, config))


def test_unused():
    config = configuration(dtype="bf16", zero={"ignore_unused_parameters": False})
    assert_same_values(*on_both(accesses.unused, config))


def test_pinned():
    assert [accesses.pinned(says)[0] for says in (None, True, False)] == [2, 2, 0]


def test_timed():
    (timed_gate, is_busy, (elapsed_ms,), step_seconds), (gate, *_) = accesses.timed()
    assert (timed_gate, is_busy, gate) == ("step", False, "module")
    assert elapsed_ms >= 1000 * step_seconds > 0


def test_reads_after_a_step():
    for now, later in weights.reads({"engine": True, "threads": 1}).values():
        assert all(torch.equal(one, other) for one, other in zip(now, later, strict=True))


@pytest.mark.parametrize("write", [torch.Tensor.zero_, lambda weight: weight.data.mul_(0.5)])
def test_writes_after_a_step(write):
    (found, flats), (expected, others) = (weights.written(block, write) for block in ENGINES)
    assert found == expected
    assert_same_partitions(flats, others)


def test_exchanged():
    for ours, theirs in zip(*(weights.refreshed(block) for block in ENGINES), strict=True):
        assert all(torch.equal(one, other) for one, other in zip(ours, theirs, strict=True))


def test_view():
    for now, weight in weights.view_kept({"engine": True}):
        assert torch.equal(now, weight)


# ---- checkpoints ----


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_checkpoints(stage, tmp_path):
    assert_resumed_by_both(configuration(dtype="bf16", stage=stage), tmp_path)


# One of a kind, and those that DeepSpeed's tool converts in this process.
@pytest.mark.parametrize(
    "name",
    [
        *(
            each
            for each in checkpoints.UNIVERSAL + checkpoints.NOT_UNIVERSAL
            if each != "q8, ZeRO-2"
        ),
        "fp32, ZeRO-2",
        "q8, ZeRO-1",
        "fp32, fp16 masters, ZeRO-2",
    ],
)
def test_saved_and_consolidated(name, tmp_path):
    run = {name: checkpoints.checkpointed(name, tmp_path)}
    test_deepspeed_checkpoints.test_resuming_is_never_having_stopped(run, name)
    test_deepspeed_checkpoints.test_safe_get_full(run, name)
    test_deepspeed_checkpoints.test_setting_works_or_is_refused(run, name)
    if name in checkpoints.UNIVERSAL:
        test_deepspeed_checkpoints.test_universal_checkpoints(run, name)
        test_deepspeed_checkpoints.test_safe_get_full_behind_a_universal_checkpoint(run, name)
    elif name in checkpoints.NOT_UNIVERSAL:
        check = (
            test_deepspeed_checkpoints.test_universal_checkpoints_without_fp32_masters_are_refused
        )
        check(run, name)


# ---- more paths ----


@pytest.mark.parametrize("stage", [2, 3])
@pytest.mark.parametrize(
    "options",
    [
        {"optimizer": "Adam", "params": {"adam_w_mode": False}},
        {"clip": 0.1, "stepwell": {"moments": "q8"}},
        {
            "optimizer": "StepwellAdamW",
            "precision": {"bf16_master_weights_and_grads": True},
        },
    ],
)
def test_optimizers(stage, options):
    assert_same_runs(*both(configuration(stage=stage, dtype="bf16", **options), steps=3))


def test_experts():
    runs = both(configuration(dtype="bf16"), model=with_experts, steps=3)
    test_deepspeed_offload.test_experts({"experts": runs})


@pytest.mark.parametrize("stage", [2, 3])
def test_growing_scale(stage):
    growing = {"initial_scale_power": 24, "hysteresis": 1, "loss_scale_window": 2}
    found = grown(configuration(dtype="fp16", stage=stage, precision=growing))
    check = test_deepspeed_offload.test_gradients_are_unscaled_by_the_scale_that_they_have
    check({"growing": found}, "growing")


@pytest.mark.parametrize("name", ["two_groups", "schedule", "stage 3"])
def test_torch_adam(name):
    options = {
        "two_groups": {"make": torch_adam.two_groups},
        "schedule": {"schedule": torch_adam.halving},
        "stage 3": {"dtype": "bf16", "stage": 3, "zero": {"sub_group_size": 3000}},
    }[name]
    ours, theirs = (torch_adam.stepped(engine, **options) for engine in (True, False))
    assert (ours["lrs"], ours["same groups"]) == (theirs["lrs"], theirs["same groups"])
    test_deepspeed_torch_adam.assert_close(ours["losses"], theirs["losses"], 2e-2)
    for (flat, state), (other, known) in zip(ours["partitions"], theirs["partitions"], strict=True):
        torch.testing.assert_close(flat, other, rtol=0.0, atol=1e-3)
        assert int(state["step"]) == int(known["step"])


@pytest.mark.parametrize("moments", ["bf16", "q8"])
@pytest.mark.parametrize("stage", [2, 3])
def test_codecs(stage, moments):
    config = configuration(stage=stage, optimizer="StepwellAdamW", params={"moments": moments})
    assert_same_runs(*both(config, steps=3))


def test_set_in_codes():
    assert all("`exp_avg` is held in codes" in each for each in training.set_in_codes(vectors(1)))


def test_clients():
    result = {}
    torch_adam.obstacles(result)
    runs = {"obstacles": result}
    test_deepspeed_torch_adam.test_deepspeed_forces_its_own_where_the_engine_does_not_step(runs)
    test_deepspeed_torch_adam.test_options_that_are_set_later_are_refused(runs)


def test_refusals(tmp_path, monkeypatch):
    result = {}
    training.program_refusals(result)
    monkeypatch.setattr(test_deepspeed_training.deepspeed_run, "run", lambda *_, **__: result)
    test_deepspeed_training.test_configurations_that_cannot_work_are_refused(tmp_path)


def test_access():
    result = {}
    offload_access.access(result)
    for name, test in vars(test_deepspeed_offload_access).items():
        if name.startswith("test_") and test.__code__.co_varnames[:1] == ("access",):
            test(result)


@pytest.mark.parametrize("stage", [2, 3])
def test_too_early(stage):
    assert all("made by the first step" in each for each in accesses.too_early(stage))


def test_claims():
    assert accesses.claims_ended() == [True] * 3
