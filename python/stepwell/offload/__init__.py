"""Parameters on an accelerator, optimizer state in host memory, for PyTorch."""

from stepwell.offload.optimizer import OffloadAdamW
from stepwell.offload.trainer import offload_trainer
from stepwell.store.deferred import Deferred
from stepwell.store.volume import Volume

__all__ = ["Deferred", "OffloadAdamW", "Volume", "offload_trainer"]
