"""What `stepwell doctor` finds, and how a section that fails becomes a finding itself."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, TypeAlias

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

__all__ = ["STATUSES", "Finding", "Status", "examine", "one_line"]

Status: TypeAlias = Literal["ok", "note", "warning", "broken"]

STATUSES: tuple[Status, ...] = ("ok", "note", "warning", "broken")
"""From the best to the worst."""


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One fact about this machine."""

    topic: str
    """What it is about."""
    status: Status
    """`note`: optional and absent; `warning`: works, but slower or smaller than it could;
    `broken`: does not work."""
    found: str
    """The fact."""
    meaning: str
    """What it means for a training run."""
    fix: str | None = None
    """How to change it; always given for a warning and for what is broken."""


def one_line(error: BaseException) -> str:
    """The kind of an error, and its message in one line."""
    message = " ".join(str(error).split())
    kind = type(error).__name__
    return f"{kind}: {message}" if message else kind


def examine(topic: str, section: Callable[[], Iterable[Finding]]) -> list[Finding]:
    """The findings of a section. An error in it is one more finding, and ends nothing else."""
    findings: list[Finding] = []
    try:
        findings.extend(section())  # what a generator yields before an error stays
    except (Exception, SystemExit) as error:  # noqa: BLE001  # a broken package may raise anything
        findings.append(
            Finding(
                topic=topic,
                status="broken",
                found=one_line(error),
                meaning="this could not be examined",
                fix="report it, with what `stepwell doctor --json` prints",
            )
        )
    return findings
