"""Optimizer state beside a device, and what steps it: the face of the core's store."""
