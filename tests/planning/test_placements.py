"""What a plan says of placements: what fits, what binds, and what would make it fit."""

import ast
import json

import pytest
import torch
from stepwell.planning import Machine, described, machine_here, plan
from stepwell.planning.plans import Plan

KINDS = {"torch", "bitsandbytes", "exact", "device share", "deferred", "streamed", "volume"}


def machine(gpu="24GB", host="64GB", **more):
    return described(gpu_memory=gpu, host_memory=host, **more)


def found_in(planned, kind, moments="fp32"):
    return next(each for each in planned.placements if (each.kind, each.moments) == (kind, moments))


def test_every_kind_is_there_with_all_that_it_takes():
    planned = plan("7B", machine=machine(), drives=["6GB/s"])
    assert {each.kind for each in planned.placements} == KINDS
    for each in planned.placements:
        assert 0 < each.peak <= sum(each.device.values()) + (64 << 20)
        assert each.host_total > 0
        assert each.step.total >= each.step.seconds["compute"] > 0
        assert each.fits is not bool(each.lacks or each.refused)


def test_the_best_is_the_fastest_that_fits():
    planned = plan("7B", machine=machine(host="256GB"))
    best, second = planned.best
    assert (best.kind, best.moments) == ("streamed", "q8")
    assert (second.kind, second.moments) == ("streamed", "fp32")
    # All is on the device where it fits.
    assert plan("1B", machine=machine(gpu="80GB")).best[0].kind == "torch"
    nothing = plan("70B", machine=machine())
    assert nothing.best == []
    assert all(each.lacks or each.refused for each in nothing.placements)


def test_deferred_updates_are_no_advice_beside_exact_ones():
    planned = plan("3B", machine=machine(gpu="24GB", host="256GB"))
    deferred = found_in(planned, "deferred")
    assert deferred.fits
    assert deferred.step.total < planned.best[0].step.total
    assert deferred not in planned.best


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_with_more_tokens_nothing_but_compute_binds(kind):
    given = {"machine": machine(host="512GB"), "drives": ["3GB/s"]}
    each = found_in(plan("7B", **given), kind, "8-bit" if kind == "bitsandbytes" else "fp32")
    if each.binds_until is None or each.binds_until <= 4096:
        return
    assert each.step.binds != "compute"
    size = int(each.binds_until / 4096) + 1
    more = plan("7B", micro_batch=size, **given)
    assert found_in(more, kind, each.moments).step.binds == "compute"


def test_a_slower_part_is_what_binds():
    slow_host = plan("7B", machine=machine(host_rate="5GB/s"))
    assert found_in(slow_host, "exact").step.binds == "host memory"
    few_cores = plan("7B", machine=machine(cores=1, host_rate="500GB/s"))
    assert found_in(few_cores, "exact", "q8").step.binds == "host cores"
    slow_bus = plan("7B", machine=machine(bus="1GB/s", host_rate="500GB/s", cores=64))
    assert found_in(slow_bus, "streamed").step.binds == "bus"
    slow_drive = plan("30B", machine=machine(), drives=["1GB/s"])
    assert found_in(slow_drive, "volume").step.binds == "drives"
    slow_gpu = plan("1B", machine=machine(flops="1TFLOPS"))
    assert found_in(slow_gpu, "exact").step.binds == "compute"


def test_a_share_of_the_state_fills_the_device():
    planned = plan("2B", loss_tokens=1024, machine=machine(host="256GB"))
    share, exact = found_in(planned, "device share"), found_in(planned, "exact")
    assert exact.peak < share.peak < 24e9
    assert share.device["states"] <= share.options["device_bytes_max"]
    assert share.host_total < exact.host_total
    assert share.step.total < exact.step.total


def test_what_lacks_little_is_told_what_would_make_it_fit():
    planned = plan("1.2B", micro_batch=4, machine=machine())
    exact = found_in(planned, "exact")
    assert not exact.fits
    assert exact.remedy == "the loss in parts of 2,048 tokens"
    assert found_in(plan("1.2B", micro_batch=4, loss_tokens=2048, machine=machine()), "exact").fits
    # A smaller micro-batch has other passes, and the same tokens in a step.
    many = plan("3B", micro_batch=16, loss_tokens=2048, machine=machine())
    assert found_in(many, "exact").remedy.startswith("micro-batch ")
    whole = plan("2B", tokens=8192, checkpointing=False, loss_tokens=2048, machine=machine())
    assert found_in(whole, "exact").remedy == "gradient checkpointing"


def test_a_volume_has_what_host_memory_has_no_room_for():
    # What does not fit beside q8 moments either.
    planned = plan("13B", machine=machine(host="80GB"), drives=["6GB/s"])
    best = planned.best[0]
    assert (best.kind, best.moments) == ("volume", "q8")
    assert best.host_total <= 80e9
    read, written = best.drive_moved
    assert 0 < read == written == best.drive_space
    assert found_in(plan("13B", machine=machine(host="80GB")), "volume").refused
    # No volume, where all state has room.
    enough = plan("13B", machine=machine(host="800GB"), drives=["6GB/s"])
    assert found_in(enough, "volume").refused == "all state fits into host memory"


def test_several_gpus_share_weights_and_state():
    one, two = (plan("7B", gpus=gpus, machine=machine(host="512GB")) for gpus in (1, 2))
    for moments in ("fp32", "q8"):
        alone, shared = (found_in(each, "exact", moments) for each in (one, two))
        assert shared.device["weights"] == alone.device["weights"] // 2
        assert shared.host["state"] == alone.host["state"]
    assert two.workload.tokens_of_step == 2 * one.workload.tokens_of_step
    config = json.loads(two.code(found_in(two, "streamed", "q8")))
    assert config["zero_optimization"]["stage"] == 3
    assert config["stepwell"] == {"moments": "q8"}
    assert found_in(two, "deferred").refused == "one GPU only"


@pytest.mark.parametrize("gpus", [1, 2])
def test_what_is_to_be_written_parses(gpus):
    planned = plan("2B", gpus=gpus, machine=machine(host="256GB"), drives=["6GB/s"])
    for each in planned.placements:
        code = planned.code(each)
        json.loads(code) if code.startswith("{") else ast.parse(code)


def test_a_plan_is_plain_values():
    planned = plan("7B", machine=machine())
    values = json.loads(json.dumps(planned.to_dict()))
    assert values["model"]["num_params"] == 7 * 10**9
    assert len(values["placements"]) == len(planned.placements)
    assert values["placements"][values["best"][0]]["fits"]
    assert Machine.of_dict(values["machine"]) == planned.machine
    assert isinstance(planned, Plan)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"tokens": 0}, "`tokens` is `0`"),
        ({"micro_batch": 1.5}, "`micro_batch` is `1.5`"),
        ({"gpus": True}, "`gpus` is `True`"),
        ({"loss_tokens": 0}, "`loss_tokens` is `0`"),
        ({"dtype": "int8"}, "`int8`, expected one of bfloat16"),
        ({"drives": ["fast"]}, "`fast`, expected a folder"),
    ],
)
def test_a_run_that_is_none_is_refused(options, said):
    with pytest.raises(ValueError) as refused:
        plan("7B", machine=machine(), **options)
    assert said in str(refused.value)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"gpu": "24"}, "`gpu_memory` is `24`, expected bytes, as 24GB or 22GiB"),
        ({"host": "much"}, "`host_memory` is `much`"),
        ({"host": "0GB"}, "`host_memory` is `0GB`"),
        ({"bus": "25Gb/s/s"}, "`bus` is `25Gb/s/s`, expected bytes per second, as 25GB/s"),
        ({"flops": "fast"}, "`flops` is `fast`, expected operations per second"),
        ({"cores": 0}, "`cores` is `0`"),
    ],
)
def test_a_machine_that_is_none_is_refused(options, said):
    with pytest.raises(ValueError) as refused:
        machine(**options)
    assert said in str(refused.value)


def test_quantities_have_units():
    given = machine(gpu="24GiB", host="0.5TB", bus=54, flops="1PFLOPS", host_rate="160 GB/s")
    assert (given.gpu_memory, given.host_memory) == (24 << 30, 500 * 10**9)
    assert (given.bus_up, given.flops, given.host_rate) == (54e9, 1e15, 160e9)
    assert given.assumed == ("device_rate", "cores")


def test_a_folder_that_was_measured_is_a_drive(tmp_path):
    from stepwell.store.tuning import DriveTuning

    with pytest.raises(ValueError, match="was not measured, expected a folder that was"):
        plan("13B", machine=machine(), drives=[str(tmp_path)])
    DriveTuning(
        mb_per_second=5000, stripe_bytes=1 << 20, queue_depth=8, date="2026-11-28 12:00 UTC"
    ).write(tmp_path)
    planned = plan("13B", machine=machine(host="80GB"), drives=[str(tmp_path), "1GB/s"])
    assert planned.machine.drive_rate == 6e9
    assert str(tmp_path) in planned.code(planned.best[0])


def test_this_machine_is_measured_once(tmp_path, monkeypatch):
    from stepwell.planning import measuring

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    measured = []

    def measure():
        measured.append(1)
        return machine(gpu="80GB")

    monkeypatch.setattr(measuring, "_measured", measure)
    first, second = machine_here(), machine_here()
    assert (first.gpu_memory, len(measured)) == (second.gpu_memory, 1)
    assert measuring.machine_file().is_relative_to(tmp_path)
    machine_here(again=True)
    assert len(measured) == 2
    measuring.machine_file().write_text("{")
    machine_here()
    assert len(measured) == 3


def test_the_arithmetic_of_a_core_is_measured():
    from stepwell.planning.measuring import step_core_seconds

    found = step_core_seconds()
    assert found.keys() == {"fp32", "bf16", "q8"}
    assert all(1e-11 < each < 1e-6 for each in found.values())


class Tiny(torch.nn.Sequential):
    """A model as that of the lines that a plan gives."""

    def gradient_checkpointing_enable(self):
        """As models of transformers have it."""

    def cuda(self):
        """Stays on the CPU."""
        return self


def test_what_is_to_be_written_trains(tmp_path):
    from stepwell.store.tuning import DriveTuning

    DriveTuning(
        mb_per_second=5000, stripe_bytes=1 << 20, queue_depth=8, date="2026-11-28 12:00 UTC"
    ).write(tmp_path)
    ran = set()
    for host in ("14GB", "256GB"):
        planned = plan("2B", machine=machine(host=host), drives=[str(tmp_path)])
        for each in planned.placements:
            key = each.kind, each.moments, *each.options
            # What is told to be refused, and what is not ours.
            if each.kind == "bitsandbytes" or "activations" in each.options or key in ran:
                continue
            ran.add(key)
            model = Tiny(torch.nn.Linear(8, 8), torch.nn.Linear(8, 8)).to(torch.bfloat16)
            code = planned.code(each).replace('"cuda"', '"cpu"').replace('name="run"', 'name="r"')
            names = {"model": model}
            exec(code, names)  # noqa: S102
            model(torch.ones(2, 8, dtype=torch.bfloat16)).float().sum().backward()
            names["optimizer"].step()
            del names, model
    assert len(ran) == 9
