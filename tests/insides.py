"""What tests ask of the inside of optimizers: the private names of the package stand here, once.

By these facts a test knows that what it is about is the case: that updates are pending, that a
weight is under way. No program needs them.
"""

from late_engine import LateEngine

# ---- of `stepwell.OffloadAdamW` ----


def engine_of(optimizer):
    """What steps in the background, once there was a step."""
    assert optimizer._engine is not None
    return optimizer._engine


def core_of(optimizer):
    """The core's engine, which is made when it is first needed."""
    return optimizer._background.opened()._core


def make_late(optimizer):
    """No step begins before something waits for it, from now on. Returns what tells."""
    engine = optimizer._background.opened()
    engine._core = LateEngine(engine._core)
    return engine._core


def num_pending(optimizer):
    """Of how many parameters updates are deferred that are not applied yet."""
    return len(engine_of(optimizer).pending_params)


def is_pending(optimizer, param):
    """Whether an update of it is deferred."""
    return engine_of(optimizer).is_pending(param)


def host_weight(optimizer, param):
    """The host side of a weight: what was uploaded last, or will be next."""
    return optimizer._twins.weight(param)


def has_host_side(optimizer, param):
    """Whether it takes host memory."""
    return param in optimizer._twins


def gate_of(optimizer):
    """What has forwards wait."""
    return optimizer._gate


def forwards_wait(optimizer):
    """Whether they do, so that no step waits for its weights."""
    return optimizer._gate.is_open


def is_any_under_way(optimizer):
    """Whether something may have to wait for a weight."""
    return optimizer._gate.guard.any_under_way


def swapped_of(optimizer):
    """Its state on drives."""
    return optimizer._host.swapped


# ---- of ZeRO ----


def partitions_of(zero):
    """The partitions of a ZeRO optimizer."""
    return zero._partitions


def make_partitions_late(partitions):
    """No step begins before something waits for it, from now on. Returns what tells."""
    partitions._engine = LateEngine(partitions._engine)
    return partitions._engine


def pinned_nbytes(partitions):
    """How much host memory its engine has pinned."""
    return partitions._engine.pinned_nbytes
