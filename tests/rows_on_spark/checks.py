"""The five checks of ``make rows-on-spark``; each returns what it has found wrong, a line each."""

from __future__ import annotations

import re
from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Callable
from typing import Any, Final

from tests.rows_on_spark.evidence import Evidence
from tests.rows_on_spark.processes import UNKNOWN, sum_unseen
from tests.rows_on_spark.requests import RESULT_BOUND, StorePlace, classify_request, name_folder

UNIT_BYTES: Final = 4 << 20
"""Bytes of one task of the division; a single larger row group is a task of its own."""
LARGEST_TASK: Final = 4 * UNIT_BYTES
"""No task may read more, but for what cannot be divided (`StorePlace.indivisible`)."""
EVENTS_JOB: Final = "events"
LARGEST_RANGE: Final = 9 * UNIT_BYTES
"""No task may write more events: ranges of time have about 32 MiB."""
UNSEEN_SECONDS: Final = 2.0
"""Processor time of a run that may be of processes which ended between two looks."""
READ_JOB: Final = "read"
INPUT_JOBS: Final = (READ_JOB, "late", "inspect")
"""Jobs whose tasks say how much of the input they have read; of others it is what they wrote."""
_OF_TASKS: Final = frozenset({"task", "executor", "daemon"})
_OF_DRIVER: Final = frozenset({"driver", "jvm"})
_UNITS: Final = {"": 1, "b": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30}
Check = Callable[[Evidence], list[str]]


def check_store(found: Evidence) -> list[str]:
    """No row passes between the store and a process other than Spark's tasks."""
    moved: dict[str, Counter[str]] = defaultdict(Counter)
    results: Counter[int] = Counter()
    for request in found.requests:
        content = classify_request(request, found.place)
        if request.kind in _OF_TASKS or not request.size:
            continue
        if content == "results" and request.kind in _OF_DRIVER:
            results[bisect_left(found.seal_times, request.ended)] += request.size
        elif content in ("rows", "results"):
            moved[request.kind][name_folder(request, found.place)] += request.size
    wrong = []
    for kind, folders in sorted(moved.items()):
        size, (largest, _) = folders.total(), folders.most_common(1)[0]
        wrong.append(f"{kind} moved {format_size(size)} of rows, most in {largest}")
    if max(results.values(), default=0) > RESULT_BOUND:
        most = format_size(max(results.values()))
        wrong.append(f"driver moved {most} of window results in one epoch")
    return wrong


def check_rows(found: Evidence) -> list[str]:
    """Tasks in workers of Spark report all rows that were read, and have fetched them."""
    jobs = [one for one in found.list_events("tasks_finished") if one["job"] == READ_JOB]
    tasks = [task for job in jobs for task in job["tasks"]]
    # An epoch that ends at a barrier, or for another reason reads less than was planned, is read
    # again: the last job of its slot has the rows that were sealed.
    sealed = {job.get("slot"): job["tasks"] for job in jobs}
    total = sum(task["rows"] for own in sealed.values() for task in own)
    wrong = []
    if not tasks:
        wrong.append(f"no task reported; {found.read_rows:,} rows were read")
    elif total < found.read_rows:  # rows that are barriers are reported too, and are no data
        wrong.append(f"tasks reported {total:,} rows of {found.read_rows:,}")
    kinds: dict[int, set[str]] = defaultdict(set)
    for one in found.members:
        kinds[one.pid].add(one.kind)
    strange = {
        task["pid"]
        for task in tasks
        if "task" not in kinds[task["pid"]] or "daemon" not in kinds[task["parent"]]
    }
    if strange:
        wrong.append(f"{len(strange)} reporting processes are no workers of Spark")
    fetched = _sum_fetched(found)
    idle = {task["pid"] for task in tasks if task["rows"] and not fetched[task["pid"]]} - strange
    if idle:
        wrong.append(f"{len(idle)} reporting workers have fetched no rows")
    return wrong


def check_results(found: Evidence) -> list[str]:
    """What tasks send to the driver stays below the bound of an epoch."""
    wrong = []
    setting = found.spark.settings.get("spark.driver.maxResultSize", "not set")
    if parse_size(setting) != RESULT_BOUND:
        wrong.append(f"spark.driver.maxResultSize is {setting}")
    epochs: Counter[int] = Counter()
    times = found.seal_times
    for task in found.spark.tasks:
        epochs[bisect_left(times, task.finished)] += task.size
    largest = max(epochs.values(), default=0)
    if not found.spark.tasks:
        wrong.append("Spark ran no task")
    if largest > RESULT_BOUND:
        wrong.append(f"tasks sent {format_size(largest)} to the driver in one epoch")
    return wrong


def check_time(found: Evidence) -> list[str]:
    """The processor time of every process is accounted for, and each process is known."""
    wrong = [
        f"unknown process {one.pid} used {one.cpu:.2f} s: {one.command[:70]}"
        for one in found.members
        if one.kind == UNKNOWN and one.cpu > 0 and not one.is_short_copy
    ]
    unseen = sum_unseen(found.members)
    if unseen > UNSEEN_SECONDS:
        wrong.append(f"{unseen:.1f} s of processor time are of processes that were not seen")
    return wrong


def check_division(found: Evidence) -> list[str]:
    """Each job has the tasks of its division, once each, and none is too large."""
    wrong, told = [], Counter[int]()
    jobs = found.list_events("tasks_finished")
    if not jobs:
        wrong.append("no job reported its division")
    sizes = Counter(found.spark.count_tasks())
    for event in jobs:
        tasks: list[dict[str, Any]] = event["tasks"]
        where = f"slot {event['slot']}" if "slot" in event else f"job {event['job']}"
        if sorted(task["task"] for task in tasks) != list(range(len(tasks))):
            wrong.append(f"{where}: the tasks are not numbered 0 to {len(tasks) - 1}")
        sizes[len(tasks)] -= 1
        if sizes[len(tasks)] < 0:
            wrong.append(f"{where}: Spark ran no stage of {len(tasks)} tasks")
        largest = max((task.get("bytes", 0) for task in tasks), default=0)
        if largest > _find_bound(event["job"], found.place):
            wrong.append(f"{where}: a task of {event['job']} had {format_size(largest)}")
        if event["job"] in INPUT_JOBS:
            for task in tasks:
                told[task["pid"]] += task["bytes"]
    fetched = _sum_fetched(found)
    hidden = sum(max(fetched[pid] - size, 0) for pid, size in told.items())
    if hidden > UNIT_BYTES:
        wrong.append(f"tasks read {format_size(hidden)} more of the input than they reported")
    return wrong


CHECKS: Final[dict[str, Check]] = {
    "store": check_store,
    "rows": check_rows,
    "results": check_results,
    "time": check_time,
    "division": check_division,
}


def run_checks(found: Evidence) -> dict[str, list[str]]:
    """What each check has found wrong."""
    return {name: check(found) for name, check in CHECKS.items()}


def format_size(size: int) -> str:
    """Return bytes in the unit that suits them."""
    return f"{size / 1e6:.1f} MB" if size >= 100_000 else f"{size:,} bytes"


def parse_size(text: str) -> int | None:
    """Return the bytes that a setting of Spark means, or None."""
    match = re.fullmatch(r"(\d+)\s*([bkmg]?)b?", text.lower())
    return int(match[1]) * _UNITS[match[2]] if match else None


def _find_bound(job: str, place: StorePlace) -> int:
    if job == EVENTS_JOB:
        return LARGEST_RANGE
    return max(LARGEST_TASK, *place.indivisible.get(job, {}).values(), 0)


def _sum_fetched(found: Evidence) -> Counter[int]:
    """Bytes of the input that each process has got from the store."""
    total: Counter[int] = Counter()
    own = f"{found.place.pipeline}/"
    for request in found.requests:
        key = found.place.get_key(request.path)
        if request.method == "GET" and key and not key.startswith(own):
            total[request.pid] += request.size
    return total
