"""Faces by their names, and which programs each can have."""

import stepwell
import torch
from net_cases import TAKES_MODEL, Face, assert_near, assert_same_bits
from net_models import Ballasted, Slopes
from net_programs import PROGRAMS, WITHOUT

WIDE = 700


def face_of(name, folder):
    """A face, and the one whose bits it has."""
    plain = Face()
    if name == "host":
        return Face(stepwell.AdamW, net_class=Ballasted), Face(net_class=Ballasted)
    if name == "model":
        return Face(gives_model=True), plain
    if name == "resident":
        return Face(options={"device_bytes_max": 1 << 20}), plain
    if name == "part resident":
        # The first layer's weight and bias, of 12 bytes each.
        return Face(options={"device_bytes_max": 12 * 9 * 24}), plain
    if name == "drained":
        return Face(options={"deferred": stepwell.Deferred(interval=3)}, is_drained=True), plain
    if name == "volume":
        return Face(width=WIDE, folder=folder), Face(width=WIDE)
    interval = int(name.removeprefix("late "))
    options = {"deferred": stepwell.Deferred(interval=interval)}
    return Face(options=options, net_class=Slopes), Face(net_class=Slopes)


WHOLE = ["host", "resident", "part resident", *(["model"] if TAKES_MODEL else [])]
PLACES = ["drained", "volume", "late 1", "late 4"]


def cases(faces):
    """Programs with those of `faces` that each can have."""
    return [
        (name, face)
        for name in PROGRAMS
        for face in faces
        if ("linear" if face.startswith("late") else face) not in WITHOUT[name]
    ]


def check(name, face, device, folder):
    """A program has the bits on a face that it has on the plain one."""
    ours, theirs = face_of(face, folder)
    expected = PROGRAMS[name](theirs, device)
    if device.type != "cpu":
        # Some kernels of some devices add up in any order.
        again = PROGRAMS[name](theirs, device)
        if not all(torch.equal(*pair) for pair in zip(expected, again, strict=True)):
            assert_near(PROGRAMS[name](ours, device), expected)
            return
    assert_same_bits(PROGRAMS[name](ours, device), expected)
