"""What tests ask of the inside of optimizers: the private names of the package stand here, once.

By these facts a test knows that what it is about is the case: that updates are pending, that a
weight is under way. No program needs them.
"""

from late_engine import LateEngine

# ---- of `stepwell.OffloadAdamW` ----


def engine_of(optimizer):
    """What steps in the background, once there was a step."""
    assert optimizer._background.engine is not None
    return optimizer._background.engine


def core_of(optimizer):
    """The core's engine, which is made when it is first needed."""
    return optimizer._background.opened()._core


def make_late(optimizer, kind=LateEngine):
    """No step begins before something waits for it, from now on. Returns what tells."""
    make_in_time(optimizer)
    engine = background_of(optimizer).opened()
    engine._core = kind(engine._core)
    return engine._core


def make_in_time(optimizer):
    """Steps are late no more."""
    engine = background_of(optimizer).opened()
    engine._core = getattr(engine._core, "inner", engine._core)


def background_of(optimizer):
    """What makes the engine, and ends it."""
    return optimizer._background


def num_pending(optimizer):
    """Of how many parameters updates are deferred that are not applied yet."""
    return len(engine_of(optimizer).pending_params)


def host_weight(optimizer, param):
    """The host side of a weight: what was uploaded last, or will be next."""
    return optimizer._twins.weight(param)


def twins_of(optimizer):
    """The host sides of its parameters."""
    return optimizer._twins


def lift_limit(optimizer):
    """It takes as much host memory as it needs from now on."""
    optimizer._host._bytes_max = None


def gate_of(optimizer):
    """What has forwards wait."""
    return optimizer._background.gate


def forwards_wait(optimizer):
    """Whether they do, so that no step waits for its weights."""
    return optimizer._background.gate.is_open


def is_any_under_way(optimizer):
    """Whether something may have to wait for a weight."""
    return optimizer._background.gate.guard.any_under_way


def swapped_of(optimizer):
    """Its state on drives."""
    return optimizer._host.swapped


def begin(protection):
    """Has uses of tensors wait, as the call does that begins a step."""
    for known, added in protection.entries:
        known.update(added)
    for kind, tensors in protection.classes:
        for tensor in tensors:
            if type(tensor) is kind.__base__:
                tensor.__class__ = kind


# ---- what tests replace: an object, and the name of what it has ----


def protection_of_writes():
    """What has tensors wait that a step writes."""
    # Some programs that import this file are to import nothing of Stepwell yet.
    from stepwell.access.writes import Writes

    return Writes, "protection"


# ---- of ZeRO ----


def partitions_of(zero):
    """The partitions of a ZeRO optimizer."""
    return zero._partitions


def are_weights_late(zero):
    """Whether weights on the device lack an update of a ZeRO optimizer, or DeepSpeed's, of one."""
    pending = getattr(getattr(zero, "_partitions", None), "pending", None)
    return pending is not None and not pending.is_landed


def writes_under_way(partitions):
    """Weights in host memory whose uses wait."""
    return partitions._writes


def device_sums(partitions):
    """The sums of gradients that the device holds."""
    return partitions.gradients._sums.values()


def runs_of(partitions):
    """Its spans, as their gradients are asked for."""
    return partitions._spans.runs


def core_of_partitions(partitions):
    """The core's engine that steps them."""
    return partitions.engine.core


def make_partitions_late(partitions):
    """No step begins before something waits for it, from now on. Returns what tells."""
    partitions.engine._core = late = LateEngine(partitions.engine.core)
    if hasattr(partitions.gradients, "_core"):
        # Their updates are deferred.
        partitions.gradients._core = late
    return late


def fetcher_of(zero):
    """What has the weights of ZeRO-3 on the device."""
    return zero.parameter_offload.fetcher


def num_elements_live(fetcher):
    """How many elements of weights are on the device."""
    return fetcher._live_numel


def num_elements_ahead(fetcher):
    """How many of them no module has asked for yet."""
    return fetcher._ahead_numel


def num_elements_leaving(fetcher):
    """How many of them are freed once what uses them has ended."""
    return fetcher._leaving_numel
