"""How long one `decide` takes at 1,000 and 10,000 members: ``make bench-decider``.

Not a test: prints the median processor time of several epochs in which every member read rows, and
of idle ones.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from dataclasses import replace

from tests.conformance.feed import pipeline
from tidegate.jobs.eventtime.decider import create_initial_state, decide, find_next_timer
from tidegate.jobs.eventtime.decision_types import Member, MemberSurvey, Survey

ROUNDS = 15


def survey(epoch: int, count: int, *, rows: bool) -> Survey:
    """Every member reads 100 rows, or none does."""
    start = epoch * 1_000_000
    members = [MemberSurvey(Member("s", f"{n:05d}")) for n in range(count)]
    if rows:
        for n, member in enumerate(members):
            newest = start + n + 900_000
            carried = {"newest": newest, "last": newest}  # a survey of rows always has these
            members[n] = replace(
                member, rows=100, min_time=start + n, max_time=newest, punctuation_state=carried
            )
    return Survey(start, tuple(members))


def measure(count: int, *, rows: bool) -> tuple[float, float]:
    """Median milliseconds of `decide`, and of the state's way through JSON and back."""
    spec = pipeline(("s",), {"lag": 1_000_000, "partition_by": "folder"})
    state = decide(spec, create_initial_state(spec), survey(0, count, rows=True)).after
    deciding, coding = [], []
    for epoch in range(1, ROUNDS + 1):
        given = survey(epoch, count, rows=rows)
        began = time.process_time()
        decision = decide(spec, state, given)
        deciding.append(time.process_time() - began)
        began = time.process_time()
        state = json.loads(json.dumps(decision.after))
        coding.append(time.process_time() - began)
        find_next_timer(spec, state)
    return statistics.median(deciding) * 1000, statistics.median(coding) * 1000


def main() -> None:
    """Print one line per size and kind of epoch."""
    for count in (1_000, 10_000):
        for rows in (True, False):
            deciding, coding = measure(count, rows=rows)
            kind = "with rows" if rows else "idle"
            sys.stdout.write(
                f"{count:6d} members, {kind:9s}: decide {deciding:7.2f} ms, state to JSON and back"
                f" {coding:7.2f} ms\n"
            )


if __name__ == "__main__":
    main()
