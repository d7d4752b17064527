"""Parameters on an accelerator, optimizer state in host memory: the faces of the offload engine for PyTorch."""

from stepwell.offload.optimizer import OffloadAdamW

__all__ = ["OffloadAdamW"]
