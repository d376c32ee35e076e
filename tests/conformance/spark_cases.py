"""Schedules for `stepped_run`: each preset with silences, and what no preset's example has."""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from tests.conformance.stepped_run import START, SteppedRun

EXAMPLES = Path(__file__).parents[2] / "docs" / "examples" / "presets"
MINUTE: Final = 60_000_000


def play_silences(run: SteppedRun, preset: str) -> None:
    """Sources stall, resume, fall silent, resume, fall silent together, and end.

    A minute without a row makes a source idle where the preset has a timer. The input has the
    preset's barriers and punctuation; under `streaminsight` a person sends a CTI as well.
    """
    folder = EXAMPLES / "input" / preset
    waiting = {name: deque(sorted((folder / name).iterdir())) for name in run.spec.sources}
    first, last = run.spec.sources

    def put_next(*sources: str) -> None:
        """Let the next object of each source appear."""
        for source in sources:
            if waiting[source]:
                path = waiting[source].popleft()
                run.put(source, path.name, path.read_bytes())

    with run.open_engine():
        put_next(first, last)
        run.step(1)
        for _ in range(3):  # a stall, shorter than any timer
            run.step(10)
        put_next(last)
        run.step(1)
        for _ in range(9):  # the first source is silent for longer than a minute
            run.step(10)
        ctis = {}
        if preset == "streaminsight":
            ctis = {first: _find_least_start(waiting[first][0])}
        run.step(1, ctis)
        put_next(first)
        run.step(1)
        for _ in range(9):  # both are silent
            run.step(10)
        while any(waiting.values()):
            put_next(first, last)
            run.step(1)
        run.run_to_end()


def _find_least_start(path: Path) -> int:
    """The least event time of an object, so that a CTI at it makes no later row a violation."""
    from datetime import datetime

    starts = [json.loads(line)["start"] for line in path.read_text().splitlines()]
    return min(round(datetime.fromisoformat(one).timestamp() * 1_000_000) for one in starts)


# What no example of a preset has


def write_rows(*rows: dict[str, Any]) -> bytes:
    """JSON lines; times are minutes after the start of the clock."""
    from datetime import UTC, datetime

    def format_time(minutes: float) -> str:
        """As JSON has it."""
        ticks = START + round(minutes * MINUTE)
        return datetime.fromtimestamp(ticks / 1_000_000, UTC).isoformat()

    times = ("at", "until")
    lines = (
        {n: format_time(v) if n in times and v is not None else v for n, v in row.items()}
        for row in rows
    )
    return "".join(json.dumps(line) + "\n" for line in lines).encode()


def make_spec(name: str, source: str, rest: str) -> str:
    """A pipeline with one bounded source and windows of 3 minutes."""
    return f"""apiVersion: tidegate/v1
name: {name}
sources:
  s:
    path: inbox/s/
    format: json
    event_time: at
    bounded: true
    limits: {{objects: 1}}
    {source}
windows:
  w: {{kind: tumbling, size: 3m, aggregates: {{n: count(*)}}}}
{rest}
"""


POINTS: Final = "schema: {at: timestamp, what: string}"
LASTING: Final = "schema: {at: timestamp, until: timestamp, what: string}\n    end_time: until"
CTI: Final = "barriers: {kind: what, punctuation: cti}\n    punctuation: {explicit: true"


def play_objects(run: SteppedRun, *objects: bytes, seconds: float = 1) -> None:
    """An object per epoch, and the end."""
    with run.open_engine():
        for number, data in enumerate(objects):
            run.put("s", f"{number:02}.jsonl", data)
            run.step(seconds)
        run.put("s", "_DONE", b"")
        run.run_to_end()


def at(*minutes: float, what: str | None = None) -> list[dict[str, Any]]:
    """Point rows."""
    return [{"at": minute, "what": what} for minute in minutes]


def lasting(start: float, end: float) -> dict[str, Any]:
    """An interval row."""
    return {"at": start, "until": end, "what": None}


def play_end_time(run: SteppedRun) -> None:
    """Intervals count in every window that they overlap, and may be late."""
    play_objects(
        run,
        write_rows(lasting(0.5, 7), lasting(2, 3), lasting(4, 4.5)),
        write_rows(lasting(6.5, 6.6), lasting(9, 30)),
        write_rows(lasting(1, 2), lasting(12, 13)),
    )


def play_violations(run: SteppedRun) -> None:
    """Rows below their own CTI; a CTI below the current one; a row at the CTI is legal."""
    play_objects(
        run,
        write_rows(*at(1, 5), *at(4, what="cti"), *at(3.5, 4, 9)),
        write_rows(*at(3, 10), *at(2, what="cti"), *at(11, what="cti"), *at(10.9, 11)),
    )


def play_adjustment(run: SteppedRun) -> None:
    """An interval that lasts beyond the CTI begins at it, any other row below it is dropped."""
    cti = {**lasting(9, 9), "until": None, "what": "cti"}
    play_objects(
        run,
        write_rows(lasting(1, 2), cti, lasting(7, 11), lasting(7, 9), lasting(9, 10)),
        write_rows(lasting(8, 14), lasting(15, 16)),
    )


def play_wall_clock(run: SteppedRun) -> None:
    """The frontier follows the clock, capped by the rows of the epoch, also while nothing comes."""
    play_objects(
        run,
        write_rows(*at(-1, 0.1)),
        write_rows(*at(0.5, 1)),
        write_rows(*at(-8, 4)),
        write_rows(*at(3, 9)),
        seconds=120,
    )


SIX_MINUTES: Final = write_rows(*at(0.5, 2)), write_rows(*at(3, 7)), write_rows(*at(9, 11, 13))


def play_six_minutes(run: SteppedRun) -> None:
    """StreamInsight's worked example: windows of 3 minutes, reported every 6 minutes."""
    play_objects(run, *SIX_MINUTES)


CASES: Final[dict[str, tuple[str, Callable[[SteppedRun], None]]]] = {
    "end_time": (make_spec("end_time", f"{LASTING}\n    lag: 1m", ""), play_end_time),
    "cti_violation": (
        make_spec("cti_violation", f"{POINTS}\n    {CTI}}}", "release: {mode: commit}"),
        play_violations,
    ),
    "interval_adjust": (
        make_spec(
            "interval_adjust",
            f"{LASTING}\n    {CTI}, on_violation: adjust}}",
            "release: {mode: commit, on_late: adjust}",
        ),
        play_adjustment,
    ),
    "generated_by_events": (
        make_spec(
            "generated_by_events",
            f"{POINTS}\n    punctuation: {{every_events: 2, delay: 1m, on_violation: drop}}",
            "release: {mode: commit, on_late: drop}",
        ),
        lambda run: play_objects(run, write_rows(*at(1, 8, 7, 6.9, 12)), write_rows(*at(3, 20))),
    ),
    "wall_clock": (
        make_spec("wall_clock", f"{POINTS}\n    wall_clock: {{lag: 2m}}", ""),
        play_wall_clock,
    ),
    "six_minutes": (
        make_spec(
            "six_minutes",
            f"{POINTS}\n    punctuation: {{every_span: 6m, align: floor}}",
            "preset: streaminsight",
        ),
        play_six_minutes,
    ),
}
