"""State on a volume, as far as host memory has no room for it (`docs/volume.md`)."""

from __future__ import annotations

from stepwell._sizes import COMMIT_INTERVAL, VOLUME_BUFFERS_BYTES_MAX
from stepwell.planning.offloaded import exact, host_of, offloaded_step
from stepwell.planning.placement import PROCESS_BYTES, Placement, Run, moments_option, timed
from stepwell.planning.seconds import Step
from stepwell.planning.streamed import streamed_device, streamed_step

__all__ = ["volume"]


def volume(run: Run, moments: str, *, is_streamed: bool) -> Placement:
    """State on drives, as much of it in host memory as has room.

    A step reads and writes what is there; every eighth commits, and writes weights and the state
    in host memory too, on twice the space.
    """
    model, machine, workload = run.model, run.machine, run.workload
    if is_streamed:
        device, peak = streamed_device(run, activations_on_host=False)
    else:
        base = exact(run, moments)
        device, peak = base.device, base.peak
    host = host_of(run, moments, weights=is_streamed)
    state = host.pop("state")
    room = machine.host_memory - PROCESS_BYTES - sum(host.values())
    buffers = int(min(VOLUME_BUFFERS_BYTES_MAX, max(room, 0) / 2))
    in_memory = int(min(max(room - buffers, 0), state))
    on_drives = state - in_memory
    read = written = on_drives
    commits = not is_streamed
    space = on_drives
    if commits:
        weights = workload.itemsize * model.num_params
        written += (in_memory + weights) // COMMIT_INTERVAL
        space = 2 * (state + weights)
    drives, refused = {}, ""
    if machine.drive_rate:
        drives["drives"] = (read + written) / machine.drive_rate
    if is_streamed and workload.gpus > 1:
        refused = "one GPU only"
    elif not machine.drive_rate:
        refused = "no drive is given"
    elif not on_drives:
        refused = "all state fits into host memory"

    def step(tokens: float) -> Step:
        if is_streamed:
            return streamed_step(run, tokens, moments, beside=drives, activations_on_host=False)
        return offloaded_step(run, tokens, moments, model.num_params, drives)

    title = "state on drives" + (", q8" if moments == "q8" else "")
    found = Placement(
        "volume",
        moments,
        ("weights in host memory, " if is_streamed else "weights on the GPU, ") + title,
        options={
            **({"weights": "host", "device": "cuda"} if is_streamed else {}),
            **moments_option(moments),
            "host_bytes_max": int(max(machine.host_memory - PROCESS_BYTES, 0)),
            "tier": {"drives": machine.drives, "durability": "commit" if commits else "none"},
        },
        refused=refused,
        device=device,
        peak=peak,
        host={**host, "state": in_memory, "buffers": buffers},
        drive_space=space,
        drive_moved=(read, written),
    )
    return timed(found, run, step)
