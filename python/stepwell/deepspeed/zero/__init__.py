"""ZeRO with CPU offload: Stepwell's optimizers under ZeRO, and ZeRO-1, -2 and -3 on the offload engine."""
