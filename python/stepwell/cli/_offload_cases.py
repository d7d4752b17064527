"""One training run of `stepwell bench offload`, in a process of its own.

It is started as `python -m stepwell.cli._offload_cases JSON`. The last line that it prints is a
JSON object with what was measured.
"""

from __future__ import annotations

import gc
import json
import os
import resource
import statistics
import sys
import time
from dataclasses import asdict, dataclass
from itertools import islice, pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from stepwell.cli._cases import Case
from stepwell.cli._llama import LlamaShape, read_text
from stepwell.cli._processes import launched
from stepwell.cli._quiet import quiet_deepspeed

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from transformers import LlamaConfig

__all__ = [
    "BUCKET",
    "SIZES",
    "ZERO_2",
    "Run",
    "Workload",
    "bare_run",
    "deepspeed_run",
    "forward_backward",
    "host_bytes",
    "host_peak_bytes",
    "prepare",
    "stepwell_run",
    "sync",
    "torch_run",
    "train",
]

SIZES: dict[str, dict[str, int]] = {
    "tiny": {"hidden_size": 256, "intermediate_size": 1024, "num_hidden_layers": 4,
             "num_attention_heads": 8, "num_key_value_heads": 4, "vocab_size": 4096},
    "1b": {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16,
           "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128256},
    "3b": {"hidden_size": 3072, "intermediate_size": 8192, "num_hidden_layers": 28,
           "num_attention_heads": 24, "num_key_value_heads": 8, "vocab_size": 128256},
    "8b": {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
           "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128256},
}  # fmt: skip

_LR, _BETAS, _EPS, _WEIGHT_DECAY = 1e-4, (0.9, 0.95), 1e-8, 0.1


@dataclass(frozen=True, kw_only=True)
class Workload:
    """What all runs have in common."""

    size: str
    """One of `SIZES`, or the path of a transformers `config.json` of a Llama."""
    sequence_length: int
    """Tokens per sample."""
    micro_batch: int
    """Samples per forward."""
    accumulation: int
    """Forwards per step."""
    steps: int
    """Steps that are measured, after some that are not."""
    warm_up_steps: int
    """Steps that are not measured: memory is touched for the first time in them."""
    clip_norm: float
    """What the norm of the gradients is clipped to."""
    seed: int
    """Of the weights and of the samples."""
    text: str | None
    """A file to train on; None: the standard library of Python. A token is a byte."""
    drives: tuple[str, ...] = ()
    """A folder on each drive, for cases with a volume."""
    is_compiled: bool = False
    """Whether torch.compile compiles the layers of the model."""

    def config(self) -> LlamaConfig:
        """The model's."""
        from transformers import LlamaConfig

        given = SIZES.get(self.size)
        is_tied = given is not None
        if given is None:
            given = json.loads(Path(self.size).read_text())
            is_tied = bool(given.get("tie_word_embeddings", False))
        return LlamaConfig(
            **{
                **given,
                "max_position_embeddings": self.sequence_length,
                "tie_word_embeddings": is_tied,
                "use_cache": False,
                "attn_implementation": "sdpa",
            }
        )

    def model(self, device: torch.device) -> torch.nn.Module:
        """The model in bfloat16, with activation checkpointing."""
        from transformers import LlamaForCausalLM

        torch.manual_seed(self.seed)
        with device:
            model: torch.nn.Module = LlamaForCausalLM(self.config()).to(torch.bfloat16)
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})  # type: ignore[operator]
        model.train()
        if self.is_compiled:
            for layer in model.model.layers:  # type: ignore[union-attr]
                layer.compile()
        return model

    def batches(self, device: torch.device) -> Iterator[torch.Tensor]:
        """The samples of all micro-steps."""
        shape = LlamaShape(sequence_length=self.sequence_length, batch_size=self.micro_batch)
        text = read_text(Path(self.text) if self.text else None, bytes_min=2 * self.sequence_length)
        count = (self.steps + self.warm_up_steps) * self.accumulation
        for batch in islice(text.batches(shape, seed=self.seed), count):
            yield batch.to(device)


@dataclass
class Run:
    """How a case trains."""

    forward: Callable[[torch.Tensor], torch.Tensor]
    """Loss of a batch."""
    backward: Callable[[torch.Tensor], object]
    """Of a loss."""
    step: Callable[[], float | None]
    """The optimizer's, which clears the gradients. It returns the norm of the gradients.

    It is called after every backward where `steps_itself`, else after the last.
    """
    steps_itself: bool = False
    """Whether `step` counts the micro-steps itself."""
    breakdown: Callable[[], dict[str, float]] = dict
    """Seconds and bytes of the last step, as far as they are known."""
    finish: Callable[[], object] = lambda: None
    """After the last step."""


def _device() -> torch.device:
    return torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")


def sync(device: torch.device) -> None:
    """Waits for the device."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _torch(workload: Workload, model: torch.nn.Module) -> Run:
    """Everything on the device: fp32 masters beside bfloat16 weights, torch's fused AdamW."""
    params: list[torch.Tensor] = [param for param in model.parameters() if param.requires_grad]
    masters = [param.detach().float().requires_grad_() for param in params]
    optimizer = torch.optim.AdamW(
        masters, lr=_LR, betas=_BETAS, eps=_EPS, weight_decay=_WEIGHT_DECAY, fused=True
    )

    @torch.no_grad()
    def step() -> float:
        norm = torch.nn.utils.clip_grad_norm_(params, workload.clip_norm, foreach=True)
        for master, param in zip(masters, params, strict=True):
            assert param.grad is not None
            master.grad = param.grad.float()
            param.grad = None
        optimizer.step()
        torch._foreach_copy_(params, masters)
        optimizer.zero_grad()
        return float(norm)

    return Run(_loss_of(model), _backward_of(workload), step)


def _stepwell(case: Case, workload: Workload, model: torch.nn.Module) -> Run:
    from stepwell import _core
    from stepwell.offload import Deferred, Volume
    from stepwell.store.deferred import Extents, memory_of
    from stepwell.store.twins import Twins

    given = case.options
    options: dict[str, Any] = {"moments": case.moments}
    deferred = None
    if "deferred" in given:
        fraction = given.get("fraction", 0.0)
        deferred = options["deferred"] = Deferred(interval=given["deferred"], fraction=fraction)
    if case.is_on_drives:
        options["tier"] = Volume(
            workload.drives,
            durability=given.get("durability", "commit"),
            commit_interval=given.get("commit_interval"),
        )
        # No state fits in beside the buffers, or little.
        twins = Twins(have_gradients=deferred is None, is_paged=True)
        host_bytes_max = twins.nbytes(model.parameters()) + _BUFFERS_BYTES
        if deferred is not None:
            host_bytes_max += memory_of(Extents.of(model.parameters()), deferred).pinned
        options["host_bytes_max"] = host_bytes_max
    if "resident" in given:
        numel = sum(param.numel() for param in model.parameters())
        numel = int(given["resident"] * numel)
        options["device_bytes_max"] = _core.DeviceSteps.state_nbytes(numel)
    if "streamed" in given:
        options["weights"] = "host"
    if "untold" not in given:
        options["accumulation_steps"] = workload.accumulation
    return stepwell_run(workload, model, gives_model="no model" not in given, **options)


def torch_run(workload: Workload, model: torch.nn.Module) -> Run:
    """A run of torch's fused AdamW over the model's own parameters, wherever they are."""
    params = list(model.parameters())
    optimizer = torch.optim.AdamW(
        params, lr=_LR, betas=_BETAS, eps=_EPS, weight_decay=_WEIGHT_DECAY, fused=True
    )

    def step() -> float:
        norm: Any = torch.nn.utils.clip_grad_norm_(params, workload.clip_norm, foreach=True)
        optimizer.step()
        optimizer.zero_grad()
        return float(norm.full_tensor() if hasattr(norm, "full_tensor") else norm)

    return Run(_loss_of(model), _backward_of(workload), step)


def stepwell_run(
    workload: Workload, model: torch.nn.Module, *, gives_model: bool = True, **options: Any
) -> Run:
    """A run of OffloadAdamW with `options`."""
    from stepwell.offload import OffloadAdamW

    optimizer = OffloadAdamW(
        model.named_parameters(),
        model=model if gives_model else None,
        lr=_LR,
        betas=_BETAS,
        eps=_EPS,
        weight_decay=_WEIGHT_DECAY,
        clip_norm=workload.clip_norm,
        **options,
    )

    def step() -> float | None:
        optimizer.step()
        optimizer.zero_grad()
        return optimizer.grad_norm

    return Run(
        _loss_of(model),
        _backward_of(workload),
        step,
        breakdown=lambda: optimizer.timing,
        finish=optimizer.synchronize,
    )


_BUFFERS_BYTES = 256 << 20
BUCKET = int(2e8)
_ON_CPU = {"device": "cpu", "pin_memory": True}
ZERO_2 = {"stage": 2, "reduce_bucket_size": BUCKET, "allgather_bucket_size": BUCKET}
_ZERO_3_OFFLOAD_PARAM = {
    "stage": 3,
    "reduce_bucket_size": BUCKET,
    "stage3_prefetch_bucket_size": BUCKET,
    "offload_param": _ON_CPU,
}
_ZENFLOW = {
    **ZERO_2,
    "zenflow": {
        "topk_ratio": 0.1,
        "select_strategy": "step",
        "select_interval": 16,
        "update_interval": 4,
        "overlap_step": True,
    },
}
_TWIN_FLOW = {
    "stage": 3,
    "reduce_bucket_size": BUCKET,
    "stage3_prefetch_bucket_size": BUCKET,
    # Several sub-groups, of which a share is on the device.
    "sub_group_size": BUCKET // 2,
}


# What DeepSpeed's swapper is advised to use.
_AIO = {"block_size": 1 << 20, "queue_depth": 32, "thread_count": 2, "overlap_events": True}
_BUFFERS = {"buffer_count": 12, "pipeline_read": True, "pipeline_write": True}


def _deepspeed(case: Case, workload: Workload, model: torch.nn.Module) -> Run:
    given, is_registered = case.options, case.system == "deepspeed on stepwell"
    zero: dict[str, Any] = {}
    block: dict[str, Any] = {name: given[name] for name in ("accumulate", "fetch") if name in given}
    if case.moments != "fp32":
        block["moments"] = case.moments
    more: dict[str, Any] = {}
    if "zenflow" in given:
        zero |= _ZENFLOW
    if "offload_param" in given:
        zero |= _ZERO_3_OFFLOAD_PARAM
    if "ratio" in given:
        zero |= {**_TWIN_FLOW, "offload_optimizer": {**_ON_CPU, "ratio": given["ratio"]}}
    if "nvme" in given:
        # On the drives, of which DeepSpeed's swapper uses the first.
        path = {"device": "nvme", "nvme_path": workload.drives[0], "pin_memory": True}
        zero |= {
            "stage": 3,
            "reduce_bucket_size": BUCKET,
            "stage3_prefetch_bucket_size": BUCKET // 4,
            "sub_group_size": BUCKET,
            "offload_optimizer": path if is_registered else {**path, **_BUFFERS},
        }
        numel = sum(param.numel() for param in model.parameters())
        block |= {
            "nvme_paths": list(workload.drives),
            # Weights, gradients and buffers; no state fits in, or little.
            "host_bytes_max": 4 * numel + _BUFFERS_BYTES,
            "volume": {
                "durability": given.get("durability", "commit"),
                "commit_interval": given.get("commit_interval"),
            },
        }
        more = {} if is_registered else {"aio": _AIO}
    return deepspeed_run(
        workload,
        model,
        register=is_registered,
        zero=zero or ZERO_2,
        block=block if is_registered else None,
        more=more,
    )


def deepspeed_run(
    workload: Workload,
    model: torch.nn.Module,
    *,
    register: bool,
    zero: Mapping[str, object],
    block: Mapping[str, object] | None = None,
    more: Mapping[str, object] | None = None,
    params: Mapping[str, object] | None = None,
    is_alone: bool = True,
) -> Run:
    """A run of DeepSpeed's engine.

    Args:
        workload: what is trained.
        model: likewise.
        register: whether Stepwell is registered.
        zero: what is particular of `zero_optimization`.
        block: the JSON's `stepwell`.
        more: other blocks of the JSON.
        params: more of its optimizer's.
        is_alone: whether there is no other rank, and no launcher has said so.
    """
    if is_alone:
        os.environ |= launched(1)[0]
    if torch.cuda.is_available():
        # What DeepSpeed builds is for this device. A list that is there may name others in a
        # way that it does not read (`10.0a`).
        capability = torch.cuda.get_device_capability()
        os.environ["TORCH_CUDA_ARCH_LIST"] = ".".join(map(str, capability))
    else:
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
    if register:
        import stepwell.deepspeed

        stepwell.deepspeed.register()
    with quiet_deepspeed():
        import deepspeed

        adam = {"lr": _LR, "betas": list(_BETAS), "eps": _EPS, "weight_decay": _WEIGHT_DECAY}
        engine, *_ = deepspeed.initialize(
            model=model,
            model_parameters=model.parameters(),
            config={
                "train_micro_batch_size_per_gpu": workload.micro_batch,
                "gradient_accumulation_steps": workload.accumulation,
                "bf16": {"enabled": True},
                "gradient_clipping": workload.clip_norm,
                "zero_optimization": {
                    "overlap_comm": True,
                    "contiguous_gradients": True,
                    "offload_optimizer": _ON_CPU,
                    **zero,
                },
                "optimizer": {"type": "AdamW", "params": {**adam, **(params or {})}},
                "steps_per_print": 10**9,
                "stepwell": block or {},
                **(more or {}),
            },
        )

    def step() -> float | None:
        engine.step()
        norm = engine.get_global_grad_norm()
        return None if norm is None else float(norm)

    def breakdown() -> dict[str, float]:
        return engine.optimizer.timing if register else {}

    return Run(
        _loss_of(engine),
        engine.backward,
        step,
        breakdown=breakdown,
        finish=getattr(engine.optimizer, "drain", lambda: None),
        steps_itself=True,
    )


def _loss_of(model: torch.nn.Module) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda batch: model(input_ids=batch, labels=batch).loss


def _backward_of(workload: Workload) -> Callable[[torch.Tensor], object]:
    return lambda loss: torch.autograd.backward(loss / workload.accumulation)


def prepare(name: str, workload: Workload, model: torch.nn.Module) -> Run:
    """The run of a case.

    Raises:
        ValueError: there is no case of that name.
    """
    case = Case.parse(name)
    if case.system == "torch":
        return _torch(workload, model)
    train_with = _stepwell if case.system.startswith("stepwell") else _deepspeed
    return train_with(case, workload, model)


def host_bytes() -> int:
    """What this process holds in RAM."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def host_peak_bytes() -> int:
    """The most that this process has held in RAM."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def train(workload: Workload, device: torch.device, run: Run) -> dict[str, Any]:
    """What was measured of all steps, as plain values."""
    # Before the steps, as the workers of a loader make them: L has none of that either.
    batches = iter(list(workload.batches(device)))
    losses, norms, marks = [], [], []
    breakdowns: list[dict[str, float]] = []
    first_step_seconds = 0.0
    for index in range(workload.warm_up_steps + workload.steps):
        if index == workload.warm_up_steps - 1:
            # A full collection looks at all that the libraries have made: .3 s, now and then. Not
            # directly before the first measured step, whose wait it would take away.
            gc.collect()
            gc.freeze()
        marks.append(time.perf_counter())
        total = torch.zeros((), device=device)
        for _ in range(workload.accumulation):
            loss = run.forward(next(batches))
            if index and len(breakdowns) < index:
                # Of the step before, whose end this forward has seen.
                breakdowns.append(run.breakdown())
            run.backward(loss)
            if run.steps_itself:
                norm = run.step()
            total = total + loss.detach().float()
        if not run.steps_itself:
            norm = run.step()
        # Not read here: that would wait for the device.
        losses.append(total / workload.accumulation)
        norms.append(norm)
        if index == 0:
            run.finish()
            sync(device)
            first_step_seconds = time.perf_counter() - marks[0]
    # A forward waits for the step before. So each interval has one step's wait, the first that of
    # the warm-up's last, and what the last step leaves is not of these steps.
    sync(device)
    marks.append(time.perf_counter())
    run.finish()
    sync(device)
    drain_seconds = time.perf_counter() - marks[-1]
    seconds = [end - begin for begin, end in pairwise(marks)][workload.warm_up_steps :]
    known = breakdowns[workload.warm_up_steps :]
    moved: dict[str, list[float]] = {}
    if "bytes_read" in known[0]:
        # Neither those of the first step, which reads no state, nor those of what is applied at the
        # end.
        moved["drive_bytes_per_step"] = [
            (known[-1][name] - known[0][name]) / (len(known) - 1)
            for name in ("bytes_read", "bytes_written")
        ]
    return moved | {
        "seconds": statistics.median(seconds),
        "mean_seconds": statistics.mean(seconds),
        "slowest_seconds": max(seconds),
        "all_seconds": seconds,
        "first_step_seconds": first_step_seconds,
        "drain_seconds": drain_seconds,
        "breakdown": {
            key: statistics.median(each[key] for each in known)
            for key in known[-1]
            if all(key in each for each in known)
        },
        "losses": [float(loss) for loss in losses],
        "norms": norms,
    }


def bare_run(workload: Workload, model: torch.nn.Module) -> Run:
    """A run without an optimizer: its step clears the gradients."""
    return Run(_loss_of(model), _backward_of(workload), model.zero_grad)


def forward_backward(workload: Workload, device: torch.device, run: Run) -> float:
    """Seconds of the forwards and backwards of a step, whose end is not timed."""
    batches = list(islice(workload.batches(device), workload.accumulation))
    seconds = []
    for _ in range(workload.warm_up_steps + max(workload.steps // 2, 3)):
        sync(device)
        begin = time.perf_counter()
        for number, batch in enumerate(batches):
            if number and run.steps_itself:
                run.step()
            run.backward(run.forward(batch))
        sync(device)
        seconds.append(time.perf_counter() - begin)
        run.step()
    return statistics.median(seconds[workload.warm_up_steps :])


def _kernel_pinned() -> int:
    """Bytes that the kernel has pinned for this process: buffers that are registered with rings."""
    status = Path("/proc/self/status").read_text()
    words = next((line for line in status.splitlines() if line.startswith("VmPin:")), "VmPin: 0 kB")
    return int(words.split()[1]) << 10


def main(name: str, workload: Workload) -> dict[str, Any]:
    """Runs a case, and says what was measured, as plain values."""
    device = _device()
    result: dict[str, Any] = {"name": name, "plan": asdict(workload)}
    if name == "forward and backward":
        run = bare_run(workload, workload.model(device))
        return result | {"seconds": forward_backward(workload, device, run)}
    model = workload.model(device)
    sync(device)
    before = host_bytes()
    begin = time.perf_counter()
    run = prepare(name, workload, model)
    sync(device)
    prepared = time.perf_counter() - begin
    if device.type == "cuda":
        # Weights that training has in host memory were made on the device.
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    result |= train(workload, device, run)
    # ZeRO-3 leaves nothing in a parameter itself.
    numel = sum(getattr(param, "ds_numel", param.numel()) for param in model.parameters())
    if "drive_bytes_per_step" in result:
        from stepwell._budget import pinned_bytes

        result["drive_bytes_per_param"] = [each / numel for each in result["drive_bytes_per_step"]]
        result |= {"pinned_bytes": pinned_bytes(), "registered_bytes": _kernel_pinned()}
    return result | {
        "num_params": numel,
        "prepare_seconds": prepared,
        "start_seconds": prepared + max(result["first_step_seconds"] - result["seconds"], 0.0),
        "host_bytes_per_param": (host_bytes() - before) / numel,
        "host_peak_gib": host_peak_bytes() / 2**30,
        "device_peak_gib": torch.cuda.max_memory_allocated() / 2**30
        if device.type == "cuda"
        else None,
    }


if __name__ == "__main__":
    asked = json.loads(sys.argv[1])
    print(json.dumps(main(asked["name"], Workload(**asked["plan"]))), flush=True)  # noqa: T201
    # Not through the interpreter's end: DeepSpeed leaves threads behind.
    os._exit(0)
