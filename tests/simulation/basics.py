"""What every module of the simulation names."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

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


@contextmanager
def replaced(stand_ins: Iterable[tuple[object, str, object]]) -> Iterator[None]:
    """Replace attributes for a while, as `patch.object` does, with less work.

    Args:
        stand_ins: module or class, name, replacement.
    """
    before: list[tuple[object, str, object]] = []
    try:
        for where, name, what in stand_ins:
            getattr(where, name)  # a stand-in for something that is not there helps no one
            before.append((where, name, vars(where).get(name, _INHERITED)))
            setattr(where, name, what)
        yield
    finally:
        for where, name, what in reversed(before):
            if what is _INHERITED:
                delattr(where, name)
            else:
                setattr(where, name, what)


_INHERITED = object()
