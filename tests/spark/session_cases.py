"""Random pipelines of sessions and of windows that fire early, and the rows that they meet."""

from __future__ import annotations

import random
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tests.spark.agreement import SECOND, Pair, rows_of, spec_of

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

AGGREGATES = {
    "rows": "count(*)",
    "filled": "count(v)",
    "total": "sum(v)",
    "whole": "sum(n)",
    "mean": "avg(v)",
    "low": "min(n)",
    "opened": "first(n)",
    "ended": "last(v)",
    "kinds": "distinct(n)",
    "all_of": "collect(n)",
}


def draw_windows(draw: random.Random) -> dict[str, Any]:
    """Windows of all kinds; three are sessions, and others may fire before their end."""
    shapes: list[dict[str, Any]] = [
        {"kind": "tumbling", "size": "10s"},
        {"kind": "sliding", "size": "10s", "slide": draw.choice(["5s", "3s"])},
        *(
            {
                "kind": "session",
                "gap": draw.choice(["1us", "2s", "5s"]),
                "session_touch": draw.choice(["merge", "separate"]),
                "session_late": late,
                "session_close": draw.choice(["at_end", "after_end"]),
            }
            for late in ("merged", "own", "event")
        ),
    ]
    windows = {}
    for number, shape in enumerate(shapes):
        emit = draw.choice(["close", "close", "each_epoch", "complete"])
        windows[f"w{number}"] = {
            **shape,
            "keys": draw.choice([["k"], [], ["k", "_source"], ["n", "t"]]),
            "aggregates": dict(draw.sample(sorted(AGGREGATES.items()), 5)),
            "lateness": draw.choice(["0", "0", "4s", "20s", "never"]),
            "on_late": draw.choice(["side_output", "drop", "reject_to_origin", "adjust"]),
            "emit": emit,
            "revisions": draw.choice(["accumulate", "accumulate", "delta"]),
            "fire_every": draw.choice([None, "3s"]) if emit == "close" else None,
        }
    return windows


def run_case(
    session: SparkSession | None, folder: Path, seed: int, epochs: int, **more: Any
) -> Pair:
    """One pipeline to the end of its members; each epoch is compared with the oracle.

    `more` are fields of the spec.
    """
    draw = random.Random(seed)
    lags = draw.choice([("0", "0"), ("2s", "5s"), ("10s", "0")])
    sources: dict[str, dict[str, Any]] = {
        name: {"lag": lag} for name, lag in zip("ab", lags, strict=True)
    }
    own = {"release": {"mode": "pass_through"}, "outputs": {"events": False}, **more}
    pair = Pair(spec_of(sources, windows=draw_windows(draw), **own), session, folder)
    around = draw.choice([0, -50])
    for epoch in range(epochs):
        for source in "ab":
            for partition in draw.choice([["0"], ["0", "1"]]):
                if draw.random() < 0.9:
                    pair.put(source, rows_of(draw, around), partition)
        pair.run(epoch * SECOND)
        around += draw.choice([5, 10, 25])
    pair.run(300 * SECOND, done=True)
    return pair
