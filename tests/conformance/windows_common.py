"""What the window suites share.

A pipeline whose frontier is fed by hand, and comparing expected rows with given ones.

The frontier comes from a second source, ``watermarks``, which carries nothing but punctuation; the
events import it. So a suite's own watermarks are followed exactly, and an event behind one is late
for its windows, not a broken promise.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from tests.conformance.result import CaseResult
from tidegate.errors import TidegateError
from tidegate.jobs.spec.pipeline import PipelineSpec
from tidegate.time_units import TICK_MAX

COLUMNS = {
    "t": "timestamp",
    "until": "timestamp",
    "kind": "string",
    "key": "string",
    "value": "long",
}
WINDOW = "w"
NEVER = {"idle_timeout": "never"}


class DifferenceError(Exception):
    """The engine did not do what the case says; the message names the first differing step."""


class OutOfScopeError(Exception):
    """The case is about something semantics.md section 8 leaves out; the message is that reason."""


def pipeline(
    windows: Mapping[str, Mapping[str, Any]],
    *,
    preset: str = "tidegate",
    inclusive: bool = False,
    regress: str = "ignore",
    columns: Mapping[str, str] = COLUMNS,
) -> PipelineSpec:
    """Events and watermarks as two sources; `inclusive` watermarks mean ``<= T``."""
    common = {
        "path": "x",
        "schema": dict(columns),
        "event_time": "t",
        "frame": None,
        "coalesce": NEVER,
    }
    marks = {
        **common,
        "frontier": "inclusive" if inclusive else "exclusive",
        "barriers": {"kind": "kind", "punctuation": "watermark"},
        "punctuation": {"explicit": True, "regress": regress, "advance_to_end": True},
    }
    events = {**common, "end_time": "until", "punctuation": {"import_from": "watermarks"}}
    return PipelineSpec.model_validate(
        {
            "name": "case",
            "preset": preset,
            "sources": {"events": events, "watermarks": marks},
            "coalesce": NEVER,
            "release": {"mode": "pass_through"},
            "windows": dict(windows),
        }
    )


def watermark(time: int) -> dict[str, list[dict[str, Any]]]:
    """The rows of an epoch that carries one watermark."""
    return {"watermarks": [{"t": time, "kind": "watermark"}]}


END = watermark(TICK_MAX)
"""The rows of an epoch that ends the input: the frontier goes to +inf."""


def decide_case(id: str, play: Callable[[], None]) -> CaseResult:
    """Run a case and say how it went."""
    try:
        play()
    except OutOfScopeError as reason:
        return CaseResult(id, "skipped", str(reason))
    except DifferenceError as difference:
        return CaseResult(id, "failed", str(difference))
    except TidegateError as error:
        return CaseResult(id, "failed", f"refused: {error.message}")
    return CaseResult(id, "passed")


def match(
    where: str, expected: Iterable[Mapping[str, Any]], given: Sequence[Mapping[str, Any]]
) -> None:
    """Expected rows, in any order, and no others.

    Only named attributes count, and None inside a window is open.

    Raises:
        DifferenceError: they differ.
    """
    rest = list(given)
    for row in expected:
        found = next(
            (g for g in rest if all(_same(value, g.get(name)) for name, value in row.items())), None
        )
        if found is None:
            raise DifferenceError(
                f"{where}: expected {dict(row)}, got {[_short(g, row) for g in rest]}"
            )
        rest.remove(found)
    if rest:
        raise DifferenceError(f"{where}: not expected: {[dict(g) for g in rest]}")


def _same(wanted: Any, given: Any) -> bool:
    if isinstance(wanted, list) and isinstance(given, list | tuple) and len(wanted) == len(given):
        return all(w is None or w == g for w, g in zip(wanted, given, strict=True))
    return bool(wanted == given)


def _short(given: Mapping[str, Any], row: Mapping[str, Any]) -> dict[str, Any]:
    return {name: given.get(name) for name in row}
