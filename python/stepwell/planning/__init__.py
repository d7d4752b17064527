"""Does it fit, how fast is it, and what to write: planned from sizes and rates, without a run.

Pure functions over dataclasses. Nothing here imports torch, but to look at a model that is given
as a callable, and to measure this machine.

| file | has |
|---|---|
| `model.py`, `families.py` | sizes of a model; tensors of dense decoders, by their `config.json` |
| `workload.py` | what a step trains |
| `machine.py`, `measuring.py` | memories and rates: described; measured, and kept |
| `activations.py` | bytes of the device |
| `seconds.py` | seconds of a step, and what binds |
| `placement.py` | one placement, and what all are made from |
| `on_device.py`, `offloaded.py`, `streamed.py`, `on_drives.py` | what each takes |
| `plans.py`, `recipe.py` | all of them, what the machine lacks, and which to use; what to write |
"""

from stepwell.planning.machine import Machine, described
from stepwell.planning.measuring import machine_here
from stepwell.planning.plans import Plan, plan

__all__ = ["Machine", "Plan", "described", "machine_here", "plan"]
