"""ZeRO with offloaded state: ZeRO-1, -2 and -3 on the offload engine, and Stepwell's optimizers."""
