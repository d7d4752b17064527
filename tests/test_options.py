"""Options of every face: each is checked when it is given, and errors name it and its value."""

import math
import re

import numpy as np
import pytest
import stepwell
import torch
from stepwell.deepspeed.options import Options

NO_COUNTS = [0, -1, 1.5, math.nan, "x", True, 1 << 64, [1]]
NO_BYTES = [-1, 1.5, 1e9, math.nan, "1 G", "-1GB", "GB", "99999999TB", True, 1 << 64]
NO_FLAGS = ["yes", 1, None, 0.0]
NO_CHOICES = ["x", 1, None, ["module"]]


def adamw(**options):
    return stepwell.AdamW([torch.nn.Parameter(torch.zeros(3))], **options)


def adam(**options):
    return stepwell.Adam([torch.nn.Parameter(torch.zeros(3))], **options)


def offload(**options):
    return stepwell.OffloadAdamW([torch.nn.Parameter(torch.zeros(3))], **options)


def volume(**options):
    return stepwell.Volume(["/tmp"], **options)


def given(make, option, values):
    return [(make, option, value) for value in values]


REFUSED = [
    *given(offload, "threads", NO_COUNTS),
    *given(offload, "accumulation_steps", NO_COUNTS),
    *given(offload, "host_bytes_max", NO_BYTES),
    *given(offload, "device_bytes_max", NO_BYTES),
    *given(offload, "clip_norm", [0, -1.0, math.nan, "x", torch.ones(2), 1j]),
    *given(offload, "accumulate", [each for each in NO_CHOICES if each is not None]),
    *given(offload, "weights", NO_CHOICES),
    *given(offload, "activations", NO_CHOICES),
    *given(offload, "deferred", [4, "x"]),
    *given(offload, "tier", ["/tmp", 4]),
    *(
        case
        for make in (adam, adamw, offload)
        for case in (
            *given(make, "lr", [-1, math.nan, math.inf, "x", None, 10**400, torch.ones(2)]),
            *given(make, "lr", [np.ones(2), 1j]),
            *given(make, "eps", [-1e-9, "x", None]),
            *given(make, "weight_decay", [-1, "x", None]),
            *given(make, "betas", [(0.9,), (0.9, 1.0), "xx", 0.9, (0.9, "x")]),
            *given(make, "moments", NO_CHOICES),
            *given(make, "nonfinite", NO_CHOICES),
            *given(make, "seed", [1.5, "x", None, True, math.nan]),
        )
    ),
    *given(volume, "commit_interval", NO_COUNTS),
    *given(volume, "stripe_bytes", [*NO_COUNTS, (1 << 30) + 1]),
    *given(volume, "queue_depth", [*NO_COUNTS, 4097]),
    *given(volume, "weights", [[value] for value in [*NO_COUNTS, (1 << 20) + 1]]),
    *given(volume, "weights", [5, "x"]),
    *given(volume, "io_timeout", [0, -1, math.nan, math.inf, "x", None]),
    *given(volume, "io_engine", NO_CHOICES),
    *given(volume, "durability", NO_CHOICES),
    *given(volume, "keep", ["yes", 1]),
    *given(volume, "resume", NO_FLAGS),
    *given(volume, "name", [5, b"run"]),
    *given(stepwell.Deferred, "interval", [*NO_COUNTS, 9]),
    *given(stepwell.Deferred, "warmup_steps", [-1, 1.5, "x", True, 1 << 64, math.nan]),
    *given(stepwell.Deferred, "reselect", NO_COUNTS),
    *given(stepwell.Deferred, "fraction", [-0.1, 1.1, math.nan, "x", None]),
    *given(stepwell.Deferred, "predict", NO_FLAGS),
    *given(Options, "engine", NO_FLAGS),
    *given(Options, "zenflow", NO_FLAGS),
    *given(Options, "moments", ["x", 1]),
    *given(Options, "gate", NO_CHOICES),
    *given(Options, "accumulate", NO_CHOICES),
    *given(Options, "fetch", NO_CHOICES),
    *given(Options, "threads", NO_COUNTS),
    *given(Options, "host_bytes_max", NO_BYTES),
    *given(Options, "nvme_paths", ["/tmp", [1]]),
    *given(Options, "volume", [[], "x", {"paths": ["/tmp"]}]),
]


@pytest.mark.parametrize(
    ("make", "option", "value"),
    REFUSED,
    ids=lambda value: re.sub(r"\W+", "-", getattr(value, "__name__", str(value)))[:40],
)
def test_what_no_step_could_work_with_is_refused(make, option, value):
    with pytest.raises(
        ValueError, match=rf"`(stepwell\.)?{option}[`\.]?(.|\n)*expected "
    ) as raised:
        make(**{option: value})
    said = str(raised.value)
    entry = value[0] if option == "weights" and isinstance(value, list) else value
    if not isinstance(entry, (dict, tuple, list, torch.Tensor, np.ndarray)):
        assert str(entry) in said


@pytest.mark.parametrize("paths", [5, None, b"/tmp", [5], [b"/tmp"], {"/tmp"}])
def test_paths_are_a_list_of_paths(paths):
    with pytest.raises(ValueError, match=r"`paths`.*expected"):
        stepwell.Volume(paths)


def test_numbers_of_numpy_are_taken_as_torch_takes_them():
    narrow, one = np.int8(2), np.int64(1)
    deferred = stepwell.Deferred(
        interval=narrow, predict=np.bool_(False), warmup_steps=one, fraction=np.float32(0.5)
    )
    assert deferred == stepwell.Deferred(interval=2, predict=False, warmup_steps=1, fraction=0.5)
    assert type(deferred.interval) is int
    found = volume(
        stripe_bytes=np.int32(4096), queue_depth=narrow, weights=np.array([3]), keep=np.bool_(True)
    )
    assert found == volume(stripe_bytes=4096, queue_depth=2, weights=[3], keep=True)
    optimizer = adamw(lr=np.float64(0.5), seed=np.int64(-5), betas=np.array([0.5, 0.25]))
    (param,) = optimizer.param_groups[0]["params"]
    param.grad = torch.ones(3)
    optimizer.step()
    assert torch.equal(optimizer.state[param]["exp_avg"], torch.full((3,), 0.5))
    optimizer = offload(
        threads=one,
        accumulation_steps=one,
        host_bytes_max=np.int32(1 << 30),
        device_bytes_max=np.int16(0),
        clip_norm=np.float32(1.5),
        lr=True,
    )
    assert (type(optimizer.clip_norm), optimizer.clip_norm) == (float, 1.5)


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [("40GB", 40 * 10**9), ("1.5 GiB", 3 << 29), ("512MB", 512 * 10**6), ("2TiB", 2 << 40)],
)
def test_sizes_have_units(text, nbytes):
    assert Options(host_bytes_max=text).host_bytes_max == nbytes
    with pytest.raises(ValueError, match=r"take `\d+` bytes of host memory, `1000000` are left"):
        stepwell.OffloadAdamW([torch.nn.Parameter(torch.zeros(1 << 20))], host_bytes_max="1MB")


UNKNOWN = [
    (offload, "clip_nrom", "did you mean `clip_norm`"),
    (offload, "max_grad_norm", "did you mean `clip_norm`"),
    (offload, "learning_rate", "did you mean `lr`"),
    (offload, "amsgrad", r"torch.optim.AdamW\(amsgrad=True\)"),
    (offload, "interval", "an option of `Deferred`"),
    (offload, "durability", "an option of `Volume`"),
    (offload, "something", "expected one of params, lr, "),
    (adamw, "max_grad_norm", "`clip_norm` is an option of `OffloadAdamW`"),
    (adamw, "tier", "an option of `OffloadAdamW`"),
    (adam, "wd", "did you mean `weight_decay`"),
    (volume, "stripe_byte", "did you mean `stripe_bytes`"),
    (volume, "moments", "an option of `Adam` and `AdamW` and `OffloadAdamW`"),
    (stepwell.Deferred, "intervall", "did you mean `interval`"),
    (stepwell.Deferred, "clip_norm", "an option of `OffloadAdamW`"),
    (Options, "nvme_path", "did you mean `nvme_paths`"),
]


@pytest.mark.parametrize(
    ("make", "option", "hint"), UNKNOWN, ids=lambda value: getattr(value, "__name__", str(value))
)
def test_an_unknown_option_is_refused_with_what_is_meant(make, option, hint):
    with pytest.raises(TypeError, match=rf"^`{option}` is no option of (.|\n)*{hint}"):
        make(**{option: True})


@pytest.mark.parametrize("make", [stepwell.AdamW, stepwell.OffloadAdamW])
def test_keys_of_a_group_that_would_do_nothing_are_refused(make):
    class Own(make):
        """Whose options are those of the class above it."""

        def __init__(self, *args, **options):
            super().__init__(*args, **options)

    def group(**keys):
        return [{"params": [torch.nn.Parameter(torch.zeros(3))], **keys}]

    for key, said in {
        "weight_decy": "did you mean `weight_decay`",
        "learning_rate": "did you mean `lr`",
        "moments": "expected for the optimizer as a whole",
        "clip_norm": "as a whole|an option of `OffloadAdamW`",
        "max_grad_norm": "did you mean `clip_norm`|`clip_norm` is an option of `OffloadAdamW`",
    }.items():
        with pytest.raises(
            ValueError, match=rf"^`{key}` is set for a parameter group(.|\n)*{said}"
        ):
            Own(group(**{key: 1.0}))
    # A program's own.
    keys = {"name": "norms", "lr_scale": 0.5, "no_weight_decay": True, "initial_lr": 1e-3}
    optimizer = Own(group(weight_decay=0.5, **keys))
    assert optimizer.param_groups[0].items() >= {"weight_decay": 0.5, **keys}.items()
    # Groups of another optimizer, with all its keys.
    stepwell.AdamW(optimizer.param_groups)
