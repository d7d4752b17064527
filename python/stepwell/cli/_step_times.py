"""The pictures of step times: what `stepwell bench offload` measured, for people."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["circumstances_line", "draw_every_step", "draw_step_times"]

_PEER = "deepspeed"
_LABELS = {
    "torch": "all on the GPU, torch's fused AdamW",
    "stepwell": "stepwell.OffloadAdamW",
    "stepwell q8": "stepwell.OffloadAdamW, q8 moments",
    "deepspeed": "DeepSpeed ZeRO-2, CPU offload",
    "deepspeed on stepwell": "the same JSON on Stepwell",
}
_OURS, _OTHERS = "tab:blue", "tab:gray"


def draw_step_times(axes: Axes, report: dict[str, Any]) -> None:
    """A bar for each case, the slowest on top.

    A dotted line is forward and backward alone. A black mark is the bound of an exact step that
    hides nothing: L + bytes / R.

    Args:
        axes: empty ones.
        report: what `stepwell bench offload` writes as JSON.
    """
    done = [case for case in report["cases"] if "seconds" in case]
    peer = next((case["seconds"] for case in done if case["name"] == _PEER), None)
    done.sort(key=lambda case: float(case["seconds"]))
    for position, case in enumerate(done):
        seconds, ours = case["seconds"], "stepwell" in case["name"]
        axes.barh(position, seconds, height=0.7, color=_OURS if ours else _OTHERS)
        share = f"   {seconds / peer:.2f} of DeepSpeed's" if ours and peer else ""
        bound = case.get("bound_seconds")
        # Behind the mark of a bound that the step has beaten.
        label_at = max(seconds, bound or 0)
        axes.text(label_at, position, f" {seconds:.3f} s{share}", va="center", fontsize=9)
        if bound is not None:
            axes.plot([bound, bound], [position - 0.35, position + 0.35], color="black")
    alone = report["forward_backward_seconds"]
    if alone:
        axes.axvline(alone, color="black", linestyle=":", linewidth=1)
    axes.set_yticks(range(len(done)), [_LABELS.get(case["name"], case["name"]) for case in done])
    axes.set_xlim(0, 1.3 * max((case["seconds"] for case in done), default=1.0))
    axes.spines[["top", "right"]].set_visible(False)
    axes.set_xlabel(
        "seconds per training step (dotted: forward and backward alone; black: the bound)"
    )
    axes.set_title(_what(report, done), fontsize=10, loc="left")


def draw_every_step(axes: Axes, report: dict[str, Any]) -> None:
    """A line for each case: what each step took, behind those of the warm-up.

    A median hides steps that stall, and a mean does not say how long one is. Where one takes more
    than ten times as long as another the scale is logarithmic.

    Args:
        axes: empty ones.
        report: what `stepwell bench offload` writes as JSON.
    """
    from matplotlib.ticker import LogLocator

    done = [case for case in report["cases"] if "seconds" in case]
    for case in done:
        name = _LABELS.get(case["name"], case["name"])
        label = f"{name}: mean {case['mean_seconds']:.3f} s, slowest {case['slowest_seconds']:.3f}"
        axes.plot(case["all_seconds"], label=label, linewidth=1, marker=".", markersize=3)
    every = [seconds for case in done for seconds in case["all_seconds"]]
    if every and max(every) > 10 * min(every):
        axes.set_yscale("log", subs=[])
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axes.yaxis.set_major_formatter("{x:g}")
    else:
        axes.set_ylim(bottom=0)
    axes.set_xlabel("step")
    axes.set_ylabel("seconds")
    # Beside the lines, which it would hide.
    axes.legend(fontsize=7, loc="upper left", bbox_to_anchor=(1, 1))
    axes.set_title(_what(report, done), fontsize=10, loc="left")


def _what(report: dict[str, Any], done: list[dict[str, Any]]) -> str:
    plan = report["plan"]
    size = f"{done[0]['num_params'] / 1e9:.2f} B parameters, " if done else ""
    micro_steps = f", {plan['accumulation']} micro-steps" if plan["accumulation"] > 1 else ""
    return (
        f"Llama, {size}bf16, {plan['micro_batch']} x {plan['sequence_length']} tokens{micro_steps}"
    )


def circumstances_line(report: dict[str, Any]) -> str:
    """The machine, and the day."""
    machine = report["machine"]
    return (
        f"{machine['gpu'] or 'no GPU'}, {machine['cores']} cores of {machine['cpu']}, "
        f"{report['date']}"
    )
