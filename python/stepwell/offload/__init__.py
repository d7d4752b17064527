"""Parameters on an accelerator, optimizer state in host memory, for PyTorch."""

from stepwell.offload.optimizer import OffloadAdamW
from stepwell.offload.trainer import fold_clipping

__all__ = ["OffloadAdamW", "fold_clipping"]
