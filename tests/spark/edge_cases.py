"""Random pipelines of edge events, for the movers of Spark and for tasks in this process."""

from __future__ import annotations

import random
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tests.spark.agreement import SECOND, Pair, Row, spec_of

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

AGGREGATES = {
    "rows": "count(*)",
    "total": "sum(n)",
    "top": "max(v)",
    "first": "first(n)",
    "last": "last(n)",
    "all_of": "collect(n)",
}


def windows_of(draw: random.Random) -> dict[str, dict[str, Any]]:
    """Windows that touch, and windows that overlap or leave holes between them."""
    windows: dict[str, dict[str, Any]] = {}
    for name, slide in (("tumble", None), ("slide", draw.choice(["3s", "4s", "15s"]))):
        windows[name] = {
            **({"kind": "tumbling"} if slide is None else {"kind": "sliding", "slide": slide}),
            "size": "10s",
            "offset": draw.choice(["0", "-2s", "1s"]),
            "keys": draw.choice([["k"], [], ["k", "_source"]]),
            "aggregates": dict(draw.sample(sorted(AGGREGATES.items()), 4)),
            "late_unit": "event",
            "on_late": draw.choice(["side_output", "drop", "reject_to_origin"]),
            "revisions": draw.choice(["accumulate", "delta"]),
            **draw.choice([{}, {}, {"min_window_start": 5 * SECOND}]),
        }
    return windows


def rows_of(draw: random.Random, around: int) -> list[Row]:
    """Starts, ends and other rows about a time, some of them behind, some equal."""
    rows: list[Row] = []
    for _ in range(draw.randint(0, 9)):
        time = (
            around + draw.randint(0, 8) - draw.choice([0, 0, 0, 1, 3, 12])
        ) * SECOND + draw.choice([0, 0, 500_000])
        what = draw.choice(["start", "start", "end", "end", "else", None])
        value = draw.choice([None, draw.randint(0, 64) / 4])
        rows.append(
            {
                "t": time,
                "kind": what,
                "k": draw.choice([None, "x", "y"]),
                "n": draw.randint(0, 5),
                "v": value,
            }
        )
    return rows


def run_case(session: SparkSession, tmp_path: Path, seed: int, epochs: int) -> Pair:
    """One random pipeline.

    Two sources with edges under other keys and one without, silences, and cuts anywhere.
    """
    draw = random.Random(seed)
    edges = [{"kind": "kind", "keys": ["k"]}, {"kind": "kind", "keys": ["n", "k"]}, None]
    lags = draw.choice([("0", "2s", "0"), ("5s", "5s", "5s"), ("10s", "0", "1s")])
    sources = {
        name: {"lag": lag, "edges": e} for name, lag, e in zip("abc", lags, edges, strict=True)
    }
    release = {
        "mode": draw.choice(["ordered", "pass_through", "commit"]),
        "on_late": draw.choice(["side_output", "drop"]),
    }
    pair = Pair(spec_of(sources, windows=windows_of(draw), release=release), session, tmp_path)
    around = draw.choice([0, -50])
    for epoch in range(epochs):
        for source in "abc":
            for partition in draw.choice([["0"], ["0", "1"]]):
                if draw.random() < 0.85:
                    pair.put(source, rows_of(draw, around), partition)
        pair.run(epoch * SECOND)
        around += draw.choice([5, 10, 25])
    pair.run(300 * SECOND, done=True)
    return pair
