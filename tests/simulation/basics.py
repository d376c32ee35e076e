"""What every module of the simulation names."""

from __future__ import annotations

PIPELINE = "p"
LATENCY = 0.004  # virtual seconds a request takes when nothing is wrong
NEVER = float("inf")


class Crash(BaseException):
    """kill -9: nothing catches it."""


class Violation(Exception):  # noqa: N818 - it is no error of a program but a finding
    """What must never happen has happened."""
