"""A window case in the common format, and a wrong one."""

from __future__ import annotations

CASE = {
    "id": "own.tumbling",
    "window": {"kind": "tumbling", "size": 10},
    "aggregate": "sum",
    "trigger": {"on": "watermark_passes_window_end", "panes": "accumulating"},
    "allowed_lateness": 0,
    "watermark_means": "lt",
    "steps": [
        {"op": "event", "key": "k", "value": 2, "ts": 3},
        {"op": "watermark", "ts": 10},
        {"op": "expect", "rows": [{"key": "k", "value": 2, "window": [0, 10]}]},
        {"op": "end_expect_nothing_more"},
    ],
}
WRONG = {**CASE, "id": "own.wrong", "steps": [*CASE["steps"][:2], {"op": "expect", "rows": []}]}  # type: ignore[index]
COUNTED = {**CASE, "id": "own.counted", "trigger": {"on": "count", "n": 2, "panes": "accumulating"}}
