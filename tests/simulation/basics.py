"""What every module of the simulation names."""

from __future__ import annotations

PIPELINE = "p"
LATENCY = 0.004  # virtual seconds a request takes when nothing is wrong
NEVER = float("inf")


class Crash(BaseException):
    """kill -9: nothing catches it."""


class Violation(BaseException):
    """What must never happen has happened. No code of the product catches it."""

    newest: Violation | None = None  # of the schedule: it also counts if it is lost on its way

    def __init__(self, what: str) -> None:
        super().__init__(what)
        Violation.newest = Violation.newest or self
