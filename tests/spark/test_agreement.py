"""Random pipelines, rows, silences, barriers and cuts.

The Spark mover must agree with the oracle mover on all of them.

A Spark job costs the same for one window as for six, so a case is one pipeline with many windows,
and a run tries few cases; the rarer options are drawn by the seed. `TIDEGATE_SOAK` sets another
number of cases.
"""

from __future__ import annotations

import os
import random
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.scheduling import sample_in_ci
from tests.spark.agreement import Pair, feed_random_rows, spec_of

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = pytest.mark.spark

CASES = int(os.environ.get("TIDEGATE_SOAK", "4"))
AGGREGATES = {
    "rows": "count(*)",
    "filled": "count(v)",
    "total": "sum(v)",
    "whole": "sum(n)",
    "mean": "avg(v)",
    "low": "min(n)",
    "high": "max(v)",
    "opened": "first(n)",
    "ended": "last(n)",
    "kinds": "distinct(n)",
    "about": "approx_distinct(n)",
    "median": "approx_quantile(v, 0.5)",
    "all_of": "collect(n)",
}


def windows_of(draw: random.Random) -> dict[str, dict[str, Any]]:
    """A tumbling, a sliding and two session windows with drawn options."""
    windows: dict[str, dict[str, Any]] = {}
    for name, kind in (
        ("tumble", "tumbling"),
        ("slide", "sliding"),
        ("visit", "session"),
        ("visits", "session"),
    ):
        shape: dict[str, Any] = {
            "tumbling": {"size": "10s"},
            "sliding": {"size": "10s", "slide": draw.choice(["5s", "3s", "10s"])},
            "session": {
                "gap": draw.choice(["2s", "5s"]),
                "session_touch": draw.choice(["merge", "separate"]),
                "session_late": draw.choice(["merged", "own", "event"]),
                "session_close": draw.choice(["at_end", "after_end"]),
            },
        }[kind]
        if kind != "session":
            shape |= {
                "offset": draw.choice(["0", "-2s", "1s"]),
                "late_unit": draw.choice(["event", "window", "first_window"]),
            }
            shape["zero_rows"] = draw.choice([True, False])
        windows[name] = {
            "kind": kind,
            **shape,
            "keys": draw.choice([["k"], [], ["k", "_source"]]),
            "aggregates": dict(draw.sample(sorted(AGGREGATES.items()), 5)),
            "lateness": draw.choice(["0", "4s", "20s", "never"]),
            "on_late": draw.choice(["side_output", "side_output", "drop", "reject_to_origin"]),
            "emit": draw.choice(["close", "close", "close", "each_epoch", "complete"]),
            "revisions": draw.choice(["accumulate", "accumulate", "delta"]),
        }
        if windows[name]["emit"] == "close" and not shape.get("zero_rows"):
            windows[name]["fire_every"] = draw.choice([None, "3s"])
    return windows


@pytest.mark.timeout(900)  # a case is some 60 small jobs; on a loaded machine each takes seconds
@pytest.mark.parametrize("seed", sample_in_ci(range(CASES), 2))
def test_movers_agree(session: SparkSession, tmp_path: Path, seed: int) -> None:
    """On equal cuts and decisions both movers give the same surveys, tables, counters and
    positions, epoch by epoch.
    """
    run_case(session, tmp_path, seed)


@pytest.mark.timeout(900)
@pytest.mark.parametrize("seed", sample_in_ci([1, 2], 1))
def test_movers_agree_where_tasks_merge_state(
    session: SparkSession, tmp_path: Path, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tasks that merge buckets of keys give what the driver gives for few rows."""
    monkeypatch.setattr("tidegate.jobs.spark.state_merging.MERGE_ROWS", 10)
    monkeypatch.setattr("tidegate.jobs.rows.window_merges.MANY_SEGMENTS", 3)
    run_case(session, tmp_path, seed, epochs=3)


def run_case(session: SparkSession, tmp_path: Path, seed: int, epochs: int = 4) -> None:
    """One random pipeline, epoch by epoch."""
    draw = random.Random(seed)
    marks = {"kind": "kind", "types": ["stop"]}
    lags = draw.choice([("0", "0"), ("2s", "5s"), ("10s", "0")])
    sources = {name: {"lag": lag, "barriers": marks} for name, lag in zip("ab", lags, strict=True)}
    release: dict[str, Any] = {
        "mode": draw.choice(["ordered", "ordered", "pass_through", "commit"]),
        "on_late": draw.choice(
            ["side_output", "emit_flagged", "drop", "reject_to_origin", "adjust"]
        ),
    }
    if release["mode"] != "pass_through":
        release["glom"] = {
            "dt": "2s",
            "max_rows": draw.choice([3, 1000]),
            "stamp": draw.choice(["earliest", "latest", "mean"]),
        }
    pair = Pair(
        spec_of(sources, windows=windows_of(draw), release=release, barriers={"timeout": "5s"}),
        session,
        tmp_path,
    )
    feed_random_rows(pair, draw, epochs)
