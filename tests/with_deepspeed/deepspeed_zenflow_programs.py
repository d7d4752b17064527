"""Programs (see deepspeed_run) of ZenFlow on the offload engine: its updates are deferred."""

import importlib
import itertools
import math
import os
import select
import signal
import sys
import time
import traceback
from pathlib import Path

import torch
from deepspeed_engines import (
    LR,
    Lines,
    configuration,
    initialize,
    partitions,
    perceptron,
    squared,
    train,
    vectors,
)
from fork_server import PATIENCE
from insides import core_of_partitions, partitions_of

ZENFLOW = {
    "topk_ratio": 0.1,
    "select_strategy": "step",
    "select_interval": 3,
    "update_interval": 3,
    "full_warm_up_rounds": 2,
    "overlap_step": True,
}
STEPS = 11
STAGES = (1, 2)
SAVED_AT, LAST = 7, 14
"""The step that a run is saved at, and the one that it is compared at."""


class Sums(torch.nn.Module):
    """The loss is linear in all parameters: gradients do not depend on how late weights are."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        # Rows that the border of two ranks cuts, a vector, and a branch that is not always used.
        self.layers = torch.nn.ModuleList(torch.nn.Linear(37, width) for width in (41, 8, 3))

    def forward(self, x, used=3):
        x = x.to(self.layers[0].weight.dtype)
        return sum(
            (layer(x).float() * (1 + place)).sum() for place, layer in enumerate(self.layers[:used])
        )


def linear(engine, step, rank, *, poison=False):
    """The loss of a micro-batch."""
    generator = torch.Generator().manual_seed(1000 * rank + step)
    x = torch.randn(4, 37, generator=generator)
    if poison:
        x[0, 0] = math.nan
    return engine(x.to(engine.device), used=2 if step % 5 == 3 else 3)


def with_zenflow(**changed):
    return {"zenflow": {**ZENFLOW, **changed}}


def linear_run(config, *, steps=STEPS, poisoned=(), look=None):
    """What a run ends with. `look` is called after each step."""
    engine = initialize(Sums(), config)
    rank = torch.distributed.get_rank()
    every = config.get("gradient_accumulation_steps", 1)
    is_late = []
    for step in range(steps):
        for group in engine.optimizer.param_groups:
            group["lr"] = LR / (1 + step)
        for micro in range(every):
            is_poisoned = step in poisoned and micro == 0
            engine.backward(linear(engine, step * every + micro, rank, poison=is_poisoned))
            engine.step()
        landed = getattr(engine.optimizer, "_partitions", None)
        is_late.append(not getattr(landed, "is_landed", True))
        if look is not None:
            look(engine, step)
    result = {
        "class": type(engine.optimizer).__name__,
        "late": is_late,
        "norm": float(engine.get_global_grad_norm()),
        "skipped": engine.skipped_steps,
    }
    if look is None and hasattr(engine.optimizer, "drain"):
        engine.optimizer.drain()
    result["weights"] = [param.detach().cpu().clone() for param in engine.module.parameters()]
    result["partitions"] = partitions(engine)
    engine.destroy()
    return result


CASES = {
    "ZeRO-2": {"dtype": "bf16", "clip": 0.5},
    "ZeRO-1, fp32": {"stage": 1},
    "accumulated": {"dtype": "bf16", "clip": 0.5, "gradient_accumulation_steps": 2},
    "fp16": {"dtype": "fp16", "precision": {"loss_scale": 8.0}},
    "torch": {"dtype": "bf16", "params": {"torch_adam": True}},
    "Stepwell": {"dtype": "bf16", "optimizer": "StepwellAdamW"},
}


def program_zenflow_exact_sums(result, cases):
    """Runs whose gradients are the same with and without delay."""
    import deepspeed
    import stepwell.deepspeed

    stepwell.deepspeed.register()
    deepspeed.get_accelerator().is_fp16_supported = lambda: True
    for name in cases:
        options = CASES[name]
        for is_deferred in (True, False):
            zero = with_zenflow() if is_deferred else {}
            result[name, is_deferred] = linear_run(configuration(**options, zero=zero))
    for is_deferred in (True, False):
        zero = with_zenflow() if is_deferred else {}
        config = configuration(**CASES["ZeRO-2"], zero=zero)
        result["poisoned", is_deferred] = linear_run(config, poisoned=(4, 7))


def program_zenflow_on_engine(result):
    """Training on one rank: against OffloadAdamW, looks, checkpoints, refusals, DeepSpeed's own."""
    import stepwell
    import stepwell.deepspeed
    from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_grad, safe_set_full_grad

    stepwell.deepspeed.register()

    # The same run without DeepSpeed.
    engine = initialize(perceptron(), configuration(zero=with_zenflow()))
    result["losses"] = train(engine, vectors(STEPS), squared)
    result["oldest"] = engine.optimizer.timing["oldest_age"]
    model = perceptron()
    deferred = stepwell.Deferred(interval=3, fraction=0.1, reselect=3, warmup_steps=2)
    optimizer = stepwell.OffloadAdamW(model, lr=LR, weight_decay=0.01, deferred=deferred)
    expected = []
    for batch in vectors(STEPS):
        optimizer.zero_grad()
        loss = squared(model, batch)
        loss.backward()
        optimizer.step()
        expected.append(loss.item())
    result["expected losses"] = expected

    # Every look sees all updates.
    weights = [param.detach().clone() for param in engine.module.parameters()]
    result["weights"], result["expected weights"] = weights, [*model.parameters()]
    result["exact after a look"] = partitions_of(engine.optimizer).engine.is_settled
    train(engine, vectors(3, first=STEPS), squared)
    result["late"] = not partitions_of(engine.optimizer).is_landed
    looked = safe_get_full_fp32_param(engine.module[0].weight)
    result["master"] = torch.equal(looked, engine.module[0].weight.detach())
    result["late after a look"] = not partitions_of(engine.optimizer).is_landed

    # Gradients can be read before the step.
    loss = squared(engine, next(vectors(1, first=50)))
    engine.backward(loss)
    grad = safe_get_full_grad(engine.module[0].weight)
    result["gradient"] = None if grad is None else float(grad.norm())
    raised = []
    for access in (safe_set_full_grad, lambda param, _: safe_get_full_grad(param)):
        try:
            access(engine.module[0].weight, torch.ones(64, 32))
        except ValueError as error:
            raised.append(str(error))
        if len(raised) == 1:
            engine.step()
    result["refused"] = raised
    engine.destroy()

    # As exact while it warms up.
    config = {"dtype": "bf16", "clip": 0.1, "gradient_accumulation_steps": 2}
    for name, zero in (("warm-up", with_zenflow(full_warm_up_rounds=50)), ("exact", {})):
        engine = initialize(perceptron(), configuration(**config, zero=zero))
        losses = train(engine, vectors(8), squared)
        result[name] = losses, partitions(engine)
        engine.destroy()

    try:
        moments = configuration(
            optimizer="StepwellAdamW", params={"moments": "q8"}, zero=with_zenflow()
        )
        initialize(perceptron(), moments)
    except ValueError as error:
        result["q8"] = str(error)


def program_zenflow_stages_save(result, folder):
    """Ranks that save, go on, and resume, under ZeRO-1 and -2."""
    for stage in STAGES:
        program_zenflow_saves(result.setdefault(stage, {}), f"{folder}/{stage}", stage)


def saving_configuration(stage):
    return configuration(stage=stage, dtype="bf16", clip=0.5, zero=with_zenflow(update_interval=2))


def program_zenflow_saves(result, folder, stage=2):
    """Ranks that save, go on, and resume."""
    import stepwell.deepspeed
    from deepspeed.utils import logger

    stepwell.deepspeed.register()
    lines = Lines()
    logger.addHandler(lines)
    rank = int(os.environ["RANK"])
    config = saving_configuration(stage)

    def trained(engine, first, last):
        return train(engine, vectors(last - first, first=first, rank=rank), squared)

    engine = initialize(perceptron(), config)
    trained(engine, 0, SAVED_AT)
    result["late before"] = not partitions_of(engine.optimizer).is_landed
    engine.save_checkpoint(folder)
    saved = partitions(engine)
    weights = [param.detach().clone() for param in engine.module.parameters()]
    losses = trained(engine, SAVED_AT, LAST)
    result["late"] = not partitions_of(engine.optimizer).is_landed
    result["went on"] = saved, weights, losses, partitions(engine)
    engine.module.state_dict()
    engine.eval()
    with torch.no_grad():
        squared(engine, next(vectors(1)))
    engine.optimizer.drain()
    result["weights"] = [param.detach().clone() for param in engine.module.parameters()]
    engine.destroy()
    # By an engine that has trained before, and by one that has not, as in a new process.
    for name, steps in (("again", 4), ("anew", 0)):
        engine = initialize(perceptron(seed=1), config)
        trained(engine, 40, 40 + steps)
        engine.load_checkpoint(folder)
        result["loaded", name] = partitions(engine)
        result["resumed", name] = trained(engine, SAVED_AT, LAST), partitions(engine)
        engine.destroy()
    # A look behind the first step, and nothing else that applies what is pending.
    for name, steps in (("again", 4), ("anew", 0)):
        engine = initialize(perceptron(seed=1), config)
        trained(engine, 40, 40 + steps)
        engine.load_checkpoint(folder)
        losses = trained(engine, SAVED_AT, SAVED_AT + 1)
        engine.module[0].weight.norm()
        result["looked", name] = losses + trained(engine, SAVED_AT + 1, LAST), partitions(engine)
        engine.destroy()
    engine = initialize(perceptron(seed=1), config)
    engine.load_checkpoint(folder)
    result["one step"] = trained(engine, SAVED_AT, SAVED_AT + 1), partitions(engine)
    engine.destroy()
    logger.removeHandler(lines)
    result["warnings"] = [line for line in lines.lines if "updates, since several" in line]


def program_zenflow_loads(result, folder):
    """DeepSpeed without Stepwell loads what was saved, and takes a step."""
    # It would be compiled.
    importlib.import_module("deepspeed.comm.torch").build_shm_op = lambda: None
    rank = int(os.environ["RANK"])
    for stage in STAGES:
        config = configuration(
            stage=stage,
            dtype="bf16",
            clip=0.5,
            params={"torch_adam": True},
            zero_force_ds_cpu_optimizer=False,
        )
        engine = initialize(perceptron(seed=2), config)
        engine.load_checkpoint(f"{folder}/{stage}")
        found = result[stage] = {"class": type(engine.optimizer).__name__}
        found["base"] = type(engine.optimizer.optimizer).__module__
        found["loaded"] = partitions(engine)
        found["weights"] = [param.detach().clone() for param in engine.module.parameters()]
        losses = train(engine, vectors(1, first=SAVED_AT, rank=rank), squared)
        found["one step"] = losses, partitions(engine)
        engine.destroy()


# ---- a run that is killed ----

STEPS_MAX = 10_000
SECONDS_MAX = 60


def wide(seed=0):
    """The turns of its middle matrix take about a millisecond."""
    torch.manual_seed(seed)
    return torch.nn.Sequential(
        torch.nn.Linear(32, 512), torch.nn.Linear(512, 512), torch.nn.Linear(512, 32)
    )


def save(engine, folder):
    """Trains, and saves. Returns whether weights were late until then."""
    train(engine, vectors(SAVED_AT), squared)
    is_late = not partitions_of(engine.optimizer).is_landed
    engine.save_checkpoint(folder)
    return is_late


def go_on(engine):
    """The state at the step that was saved, the losses of those behind it, the state at the end."""
    saved = partitions(engine)
    losses = train(engine, vectors(LAST - SAVED_AT, first=SAVED_AT), squared)
    at_end = partitions(engine)
    engine.destroy()
    return saved, losses, at_end


def train_and_tell(folder):
    """Saves, and goes on without an end. Prints where it is."""
    import stepwell.deepspeed

    stepwell.deepspeed.register()
    engine = initialize(wide(), saving_configuration(2))
    save(engine, folder)
    print("saved", flush=True)
    deferred = partitions_of(engine.optimizer)
    for step in itertools.count(SAVED_AT):
        assert step < STEPS_MAX
        train(engine, vectors(1, first=step), squared)
        # Behind some turns.
        if step > SAVED_AT + 3 and deferred.has_pending() and core_of_partitions(deferred).busy:
            print("turn begins", flush=True)
            while core_of_partitions(deferred).busy:
                os.sched_yield()
            print("turn ends", flush=True)


class Output:
    """What a process prints, line by line.

    Args:
        pipe: its end that is read.
    """

    def __init__(self, pipe):
        os.set_blocking(pipe, False)
        self._pipe, self._rest = pipe, ""
        self._poll = select.poll()
        self._poll.register(pipe, select.POLLIN)
        self.lines = []

    def wait(self, deadline):
        """Until there is more, or the process has ended."""
        assert self._poll.poll(max(0.0, deadline - time.monotonic()) * 1000), self.lines
        assert self.read(), f"the process has ended: {self.lines}"

    def read(self):
        """What is there. Returns whether there was something."""
        try:
            found = os.read(self._pipe, 1 << 16).decode(errors="replace")
        except BlockingIOError:
            return False
        *lines, self._rest = (self._rest + found).split("\n")
        self.lines += lines
        return bool(found)


def stop_in_a_turn(child, output):
    """Stops a process that has begun a turn, and has not told of its end."""
    deadline = time.monotonic() + SECONDS_MAX * PATIENCE
    while True:
        output.wait(deadline)
        if output.lines[-1:] != ["turn begins"]:
            continue
        # It may be over by now. So it is looked at while nothing moves on.
        os.kill(child, signal.SIGSTOP)
        assert os.WIFSTOPPED(os.waitpid(child, os.WUNTRACED)[1])
        output.read()
        if output.lines[-1] == "turn begins":
            return
        os.kill(child, signal.SIGCONT)


def killed(folder):
    """What a process has printed that was killed in a turn, and how it ended."""
    sys.stdout.flush()
    pipe, end = os.pipe()
    child = os.fork()
    if child == 0:
        # Where nobody reads it any more, what it prints is an error.
        os.close(pipe)
        os.dup2(end, 1)
        try:
            train_and_tell(folder)
        except BaseException:  # noqa: BLE001  # it ends here, and says why
            traceback.print_exc()
        finally:
            # Not into the program that has forked it.
            os._exit(1)
    os.close(end)
    output = Output(pipe)
    try:
        stop_in_a_turn(child, output)
    finally:
        os.kill(child, signal.SIGKILL)
        _, status = os.waitpid(child, 0)
        os.close(pipe)
    return output.lines, os.waitstatus_to_exitcode(status)


def program_zenflow_killed(result, folder):
    """A run that is killed in a turn is resumed, and one that was saved at its step goes on."""
    # DeepSpeed is not imported yet.
    result["killed"] = killed(folder)
    import stepwell.deepspeed

    stepwell.deepspeed.register()
    engine = initialize(wide(seed=1), saving_configuration(2))
    engine.load_checkpoint(folder)
    result["resumed"] = go_on(engine)
    engine = initialize(wide(), saving_configuration(2))
    result["late"] = save(engine, str(Path(folder) / "straight"))
    result["went on"] = go_on(engine)
