"""What a look, an epoch, a sweep, a status and a page cost as a pipeline grows: ``make costs``.

Each piece of work of a driver, of a command and of the Streams page runs on histories of up to
1,000,000 epochs, with 1 to 1,000 members, with 1 to 1,000 rows for each member and with up to
20,000 slots that the index has not seen yet. The store is in memory and counts.

Two kinds of bounds are checked, each for requests, bytes and memory:

- against the length of the history: at most `a + b log10(N)`, where `a` is the cost at the
  smallest size and `b` is a tenth of it;
- against members, rows and new slots: at most linear. The cost of one more of them, from the
  second-largest size to the largest, is at most 1.5 times what it is between the two smallest
  sizes, and stays below the constant in `LINEAR`.

One look at the longest history must also make at most 1.2 times as many calls of functions as one at
1,000 epochs. Its time is printed too, but a busy machine would fail a bound on it. Ends with
`N of N bounded`; the exit code is 1 if one is not.
"""

from __future__ import annotations

import argparse
import gc
import math
import sys
import time
from collections.abc import Callable, Sequence

from tests.checkpoints.histories import Cost, History, make_history, refresh_index, seal_next
from tests.manual_clock import ManualClock
from tidegate.checkpoints.checkpoint_catalog import CheckpointCatalog
from tidegate.checkpoints.pipeline_overview import read_overview
from tidegate.checkpoints.restore import plan_restore
from tidegate.checkpoints.retention import Retention, RetentionPolicy
from tidegate.operators.stream_view import StreamView

Work = Callable[[History], object]
# From 10,000 on: the page looks that far back for barriers, which costs less on shorter histories.
SLOTS = (10_000, 100_000, 1_000_000)
SHORTEST = 1_000
RECENT = 130  # more than a page of the table of checkpoints
MEMBERS = (1, 10, 100, 1_000)
ROWS = (1, 10, 100, 1_000)
NEW_SLOTS = (500, 2_000, 8_000, 20_000)


def look(history: History) -> None:
    """What a driver does before each epoch: read the head of the log."""
    assert history.open_log().head().record is not None


def run_epoch(history: History) -> None:
    """A new driver resumes, reads one row of each member and seals."""
    seal_next(history)


def maintain(history: History) -> None:
    """Retention and garbage collection with nothing to retire."""
    clock = ManualClock(wall_ticks=history.bench.clock.wall_ticks())
    policy = RetentionPolicy(keep_last=1_000, keep_for=0, grace=3600)
    Retention(history.open_log(), policy, external=tuple, clock=clock, workers=2).run()


def show_status(history: History) -> None:
    """`tidegate status`."""
    assert read_overview(history.open_log()).newest is not None


def list_checkpoints(history: History) -> None:
    """`tidegate checkpoints list`."""
    assert len(CheckpointCatalog(history.open_log()).list_checkpoints()) == len(history.recent)


def show_impact(history: History) -> None:
    """What a restore of the newest checkpoint would do."""
    log = history.open_log()
    checkpoint = log.head().checkpoint
    assert checkpoint is not None
    plan_restore(log, checkpoint)


def show_row(history: History) -> None:
    """The stream's row of the page, read by a server that has just started."""
    StreamView(history.store, "p", clock=history.bench.clock).summary()


def show_stream(history: History) -> None:
    """One stream's page, read by a server that has just started."""
    StreamView(history.store, "p", clock=history.bench.clock).detail()


def show_checkpoints(history: History) -> None:
    """The page's table of checkpoints."""
    StreamView(history.store, "p", clock=history.bench.clock).checkpoint_page()


AGAINST_HISTORY: tuple[Work, ...] = (
    look,
    run_epoch,
    refresh_index,
    maintain,
    show_status,
    list_checkpoints,
    show_impact,
    show_row,
    show_stream,
    show_checkpoints,
)
# Work, the sizes, and the most that one more may cost: requests, bytes, bytes of memory.
LINEAR: tuple[tuple[str, Work, Sequence[int], tuple[float, int, int]], ...] = (
    ("members", run_epoch, MEMBERS, (0.0, 2_500, 30_000)),
    ("members", show_status, MEMBERS, (0.0, 2_500, 12_000)),
    ("members", show_row, MEMBERS, (0.0, 2_500, 12_000)),
    ("rows", run_epoch, ROWS, (0.0, 200, 12_000)),
    ("new slots", refresh_index, NEW_SLOTS, (1.1, 3_000, 4_000)),
)
MEASURES = ("requests", "bytes", "memory")
HISTORY_SLACK = 0.1
# A byte of memory for each epoch would still be found.
HISTORY_ALLOWANCE = (0, 256, 60_000)
LINEAR_SLACK = 1.5
RUNS = 2  # the one that needed least memory counts
LOOK_SLACK = 1.2


def read_measures(cost: Cost) -> tuple[int, int, int]:
    """Requests, bytes both ways and memory."""
    return cost.count, cost.sent + cost.received, cost.memory


def find_log_excess(sizes: Sequence[int], costs: Sequence[Cost]) -> list[str]:
    """Return what grows faster than with the logarithm of the history."""
    return [
        f"{name} at {size:,}: {value:,}, bound {bound:,.0f}"
        for at, name in enumerate(MEASURES)
        for size, value in zip(sizes, (read_measures(c)[at] for c in costs), strict=True)
        if value
        > (
            bound := read_measures(costs[0])[at] * (1 + HISTORY_SLACK * math.log10(size / sizes[0]))
            + HISTORY_ALLOWANCE[at]
        )
    ]


def find_linear_excess(
    sizes: Sequence[int], costs: Sequence[Cost], most: tuple[float, int, int]
) -> list[str]:
    """Return what grows faster than linearly, or by more than `most` for one more."""
    found = []
    for at, name in enumerate(MEASURES):
        values = [read_measures(cost)[at] for cost in costs]
        slope = (values[-1] - values[-2]) / (sizes[-1] - sizes[-2])
        before = (values[-2] - values[-3]) / (sizes[-2] - sizes[-3])
        if slope > most[at]:
            found.append(f"{name}: {slope:,.1f} for one more, bound {most[at]:,}")
        if slope > LINEAR_SLACK * before + 0.01 * most[at]:
            found.append(f"{name}: {slope:,.1f} for one more after {before:,.1f}: not linear")
    return found


def time_looks(shortest: History, longest: History, rounds: int = 300) -> float:
    """Return the time of a look at `longest` over one at `shortest`.

    The looks alternate, and the fastest of each side counts: noise only adds time.
    """
    best = {id(shortest): math.inf, id(longest): math.inf}
    for _ in range(rounds):
        for history in (shortest, longest):
            began = time.perf_counter()
            look(history)
            best[id(history)] = min(best[id(history)], time.perf_counter() - began)
    return best[id(longest)] / best[id(shortest)]


def count_calls(work: Work, history: History) -> int:
    """Return how many functions, of Python and of C, the work calls."""
    calls = 0

    def count(_frame: object, event: str, _argument: object) -> None:
        nonlocal calls
        calls += event in ("call", "c_call")

    sys.setprofile(count)
    try:
        work(history)
    finally:
        sys.setprofile(None)
    return calls


def print_row(axis: str, work: Work, sizes: Sequence[int], costs: Sequence[Cost]) -> None:
    """Print what a piece of work costs at each size."""
    for size, cost in zip(sizes, costs, strict=True):
        requests, moved, memory = read_measures(cost)
        sys.stdout.write(
            f"{work.__name__:18} {size:>9,} {axis:9} {requests:7,} requests {moved:11,} bytes"
            f" {memory / 1024:9,.0f} KiB\n"
        )
    sys.stdout.flush()


def report(name: str, excess: list[str]) -> bool:
    """Print the verdict on one piece of work; return whether it is bounded."""
    sys.stdout.write(f"{name}: {'bounded' if not excess else 'NOT bounded'}\n")
    for line in excess:
        sys.stdout.write(f"    {line}\n")
    return not excess


def check_history(sizes: Sequence[int]) -> list[bool]:
    """Measure everything against the length of the history."""
    histories = [make_history(size, RECENT) for size in sizes]
    # Objects that live as long as the process would be searched again in every collection.
    gc.freeze()
    try:
        verdicts = []
        for work in AGAINST_HISTORY:
            costs = []
            for history in histories:
                work(history)  # the first run may read all of it once, to note what is retired
                costs.append(history.measure(work))
            print_row("epochs", work, sizes, costs)
            verdicts.append(report(f"{work.__name__} x epochs", find_log_excess(sizes, costs)))
        return [*verdicts, check_looks(histories[-1], sizes[-1])]
    finally:
        # Or DuckDB's library calls what is not collected in the end a leak, after our last line.
        gc.unfreeze()


def check_looks(longest: History, epochs: int) -> bool:
    """Compare the calls of a look at two histories; print the ratio of their times too."""
    shortest = make_history(SHORTEST, RECENT)
    few, many = (count_calls(look, history) for history in (shortest, longest))
    sys.stdout.write(
        f"a look at {epochs:,} over one at {SHORTEST:,} epochs: {many:,} over {few:,} calls,"
        f" {time_looks(shortest, longest):.2f} times as long\n"
    )
    excess = [f"{many:,} calls, bound {LOOK_SLACK * few:,.0f}"] if many > LOOK_SLACK * few else []
    return report("calls of a look x epochs", excess)


def prepare(axis: str, size: int) -> History:
    """Return a history of the given size on one of the linear axes."""
    if axis == "members":
        return make_history(1_000, 3, members=size)
    if axis == "rows":
        return make_history(1_000, 3, rows=size)
    history = make_history(size, 3)
    for key in list(history.store.bucket.objects):
        if "/index/" in key:
            del history.store.bucket.objects[key]
    return history


def check_linear() -> list[bool]:
    """Measure everything against members, rows and new slots."""
    verdicts = []
    for axis, work, sizes, most in LINEAR:
        costs = []
        for size in sizes:
            rows = size if axis == "rows" else 1
            act = (lambda h, n=rows: seal_next(h, n)) if work is run_epoch else work
            runs = [prepare(axis, size).measure_once(act) for _ in range(RUNS)]
            costs.append(min(runs, key=lambda cost: cost.memory))
        print_row(axis, work, sizes, costs)
        verdicts.append(report(f"{work.__name__} x {axis}", find_linear_excess(sizes, costs, most)))
    return verdicts


def main() -> int:
    """Print the table and the verdicts."""
    parser = argparse.ArgumentParser(description=__doc__, add_help=True)
    parser.add_argument("--slots", type=int, default=SLOTS[-1], help="the longest history")
    sizes = [size for size in SLOTS if size <= parser.parse_args().slots]
    verdicts = check_history(sizes) + check_linear()
    sys.stdout.write(f"{sum(verdicts)} of {len(verdicts)} bounded\n")
    return 0 if all(verdicts) else 1


if __name__ == "__main__":
    sys.exit(main())
