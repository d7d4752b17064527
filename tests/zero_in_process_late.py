"""As `zero_in_process.py`, where updates are deferred, or steps go on behind the program."""

import deepspeed_late_programs as late
import deepspeed_offload_param_programs as offload_param
import deepspeed_zenflow_programs as zenflow
import pytest
import test_deepspeed_late
import test_deepspeed_zenflow_engine
import torch
from deepspeed_asserts import assert_same_partitions, assert_same_runs
from deepspeed_engines import configuration
from deepspeed_paths import both
from late_engine import late_ranks
from zero_one_rank import ON_DEVICE, one_rank  # noqa: F401

# The programs run without pytest's.
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")


# ---- deferred updates ----


def zenflow_runs(options, **run):
    for zero in (zenflow.with_zenflow(), {}):
        yield zenflow.linear_run(configuration(**options, zero=zero), **run)


@pytest.mark.parametrize("case", zenflow.CASES)
def test_zenflow(case):
    ours, exact = zenflow_runs(zenflow.CASES[case])
    test_deepspeed_zenflow_engine.assert_same_ends(ours, exact)


def test_zenflow_poisoned():
    ours, exact = zenflow_runs(zenflow.CASES["ZeRO-2"], poisoned=(4, 7))
    sums = {("poisoned", True): ours, ("poisoned", False): exact}
    test_deepspeed_zenflow_engine.test_steps_that_are_not_finite_are_dropped(sums)


def test_zenflow_looks():
    result = {}
    zenflow.program_zenflow_on_engine(result)
    for name, test in vars(test_deepspeed_zenflow_engine).items():
        if name.startswith("test_") and test.__code__.co_varnames[:1] == ("one_rank",):
            test(result)


def test_zenflow_resumes(tmp_path):
    result = {}
    zenflow.program_zenflow_saves(result, str(tmp_path))
    saved, _, losses, at_end = result["went on"]
    assert result["late"]
    for name in ("again", "anew"):
        assert_same_partitions(result["loaded", name], saved)
        assert result["resumed", name][0] == losses
        assert_same_partitions(result["resumed", name][1], at_end)


# ---- steps that are late ----


@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"dtype": "fp32"},
        {"gradient_accumulation_steps": 2, "clip": 0.1},
        ON_DEVICE,
        {"stepwell": {"gate": "step"}},
    ],
)
def test_late_steps(stage, options, monkeypatch):
    config = configuration(stage=stage, **{"dtype": "bf16", **options})
    with late_ranks(monkeypatch):
        assert_same_runs(*both(config, steps=3))


@pytest.mark.parametrize("reader", test_deepspeed_late.READERS)
def test_readers(reader, monkeypatch):
    one = {reader: late.readers()[reader]}
    monkeypatch.setattr(late, "readers", lambda: one)
    result = {}
    late.read(result, "late", offload_param.offloaded(persistent=100))
    late.read(result, "in time", offload_param.offloaded(persistent=100), is_late=False)
    test_deepspeed_late.test_a_reader_waits(result, reader)


@pytest.mark.parametrize("persistent", [0, 100])
@pytest.mark.parametrize("options", [{}, {"zero": {"sub_group_size": 3000}}, {"clip": 0.1}])
def test_late_parameters_in_host_memory(persistent, options):
    found = []
    for is_late in (True, False):
        engine, made, losses = late.trained_late(
            offload_param.offloaded(persistent=persistent, **options), is_late=is_late
        )
        assert made is None or made.is_late
        found.append((losses, offload_param.weights(engine)))
        engine.destroy()
    (losses, weights_of), (expected_losses, expected) = found
    assert losses == expected_losses
    assert all(map(torch.equal, weights_of, expected))


@pytest.mark.parametrize("part", [late.waits, late.prefetches, late.written, late.exposed])
def test_late_parts(part):
    result = {}
    part(result)
    tests = {
        late.waits: test_deepspeed_late.test_a_forward_waits_for_what_it_gathers,
        late.prefetches: test_deepspeed_late.test_nothing_is_prefetched_while_a_step_runs,
        late.written: test_deepspeed_late.test_what_a_program_writes_comes_after_the_step,
        late.exposed: test_deepspeed_late.test_a_step_waits_for_what_can_be_reached_otherwise,
    }
    tests[part](result)


@pytest.mark.parametrize("name", late.ON_ONE_RANK)
def test_late_on_one_rank(name):
    found = [late.on_one_rank(name, is_late=is_late) for is_late in (True, False)]
    test_deepspeed_late.test_zero_2_on_one_rank_waits({"on one rank": {name: found}}, name)


def test_masters_are_given_out_when_the_step_has_ended():
    found = {"given out": late.given_out()}
    test_deepspeed_late.test_masters_are_given_out_when_the_step_has_ended(found)


def test_states_that_move():
    (losses, found), (expected_losses, expected) = late.moved({})
    assert losses == expected_losses
    assert all(map(torch.equal, found, expected))
