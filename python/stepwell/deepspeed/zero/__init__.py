"""ZeRO with CPU offload: ZeRO-1, -2 and -3 on the offload engine, and Stepwell's optimizers."""
