"""The outcome of one conformance case."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class CaseResult:
    """What became of one case.

    Attributes:
        id: the case, as its file names it.
        outcome: how it went.
        detail: the first differing step, or why it was skipped; empty when it passed.
    """

    id: str
    outcome: Literal["passed", "failed", "skipped"]
    detail: str = ""
