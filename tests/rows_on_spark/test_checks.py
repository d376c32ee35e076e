"""Each check passes an honest run, and finds what it is meant for."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from tests.rows_on_spark.checks import parse_size, run_checks
from tests.rows_on_spark.evidence import Evidence, SparkLog, TaskResult, read_event_log
from tests.rows_on_spark.processes import Seen
from tests.rows_on_spark.requests import RESULT_BOUND, Request, StorePlace

MEGABYTE = 1_000_000


def report(number: int, **own: Any) -> dict[str, Any]:
    """What an honest task tells."""
    base = {"task": number, "rows": 10, "bytes": MEGABYTE, "pid": 40 + number, "parent": 30}
    return {**base, "cpu": 0.1, **own}


def fetch(pid: int, kind: str, size: int = MEGABYTE) -> Request:
    """A read of the input."""
    return Request(pid, kind, "GET", f"/bucket/here/inbox/{pid}.parquet", size)


def make_evidence() -> Evidence:
    """An honest run: one epoch, two tasks."""
    members = [
        Seen(10, 1, 1, 1.0, "driver", "driver", waited=4.0),
        Seen(20, 10, 2, 1.0, "java", "jvm"),
        Seen(30, 20, 3, 1.0, "daemon", "daemon"),
        Seen(40, 30, 4, 1.0, "daemon", "task"),
        Seen(41, 30, 5, 1.0, "daemon", "task"),
    ]
    tasks = [report(0), report(1)]
    log = [
        {"event": "tasks_finished", "job": "read", "slot": 1, "tasks": tasks},
        {"event": "sealed", "epoch": 1, "rows": 20, "timestamp": "1970-01-01T00:00:09Z"},
    ]
    settings = {"spark.driver.maxResultSize": str(RESULT_BOUND)}
    spark = SparkLog(settings, [TaskResult(0, 5.0, 1000), TaskResult(0, 5.0, 1000)])
    place = StorePlace("bucket", "here", "p", frozenset({"w"}))
    requests = [fetch(40, "task"), fetch(41, "task")]
    return Evidence(place, requests, members, log, spark)


def list_failed(found: Evidence) -> list[str]:
    """The checks that have found something."""
    return [name for name, wrong in run_checks(found).items() if wrong]


def test_an_honest_run_passes() -> None:
    """Nothing is found wrong."""
    assert run_checks(make_evidence()) == {
        "store": [],
        "rows": [],
        "results": [],
        "time": [],
        "division": [],
    }


@pytest.mark.parametrize("kind", ["driver", "jvm", "unknown", "launcher", "cluster"])
def test_store_names_who_moved_rows(kind: str) -> None:
    """Any process but a task and its executor."""
    found = make_evidence()
    found.requests.append(fetch(10, kind, 26_200_000))
    assert list_failed(found) == ["store"]
    assert run_checks(found)["store"] == [f"{kind} moved 26.2 MB of rows, most in inbox/"]


def test_store_bounds_the_window_results_of_an_epoch() -> None:
    """The driver may merge and write them up to the bound, and keep them as state."""
    found = make_evidence()
    half, attempt = RESULT_BOUND // 2, "000001-ab12cd34ef56"
    table = f"/bucket/here/p/timelines/0/tables/w/{attempt}/1.parquet"
    state = f"/bucket/here/p/timelines/0/state/{attempt}/window-w-00000.parquet"
    found.requests.append(Request(10, "driver", "PUT", table, half, ended=5.0))
    found.requests.append(Request(10, "driver", "PUT", state, half, ended=6.0))
    found.requests.append(Request(20, "jvm", "GET", state, half, ended=12.0))  # the next epoch
    assert list_failed(found) == []
    found.requests.append(Request(20, "jvm", "GET", state, 1, ended=7.0))
    assert list_failed(found) == ["store"]


def test_store_does_not_count_the_probe() -> None:
    """A driver asks at its start what the store does with objects of its own."""
    found = make_evidence()
    probe = "/bucket/here/tidegate-probe/ab12"
    found.requests.append(Request(10, "driver", "PUT", probe, 4 * MEGABYTE))
    assert list_failed(found) == []


def test_rows_that_are_read_again_count_once() -> None:
    """A cut that ends at a barrier is read again, with fewer rows; the first job counts nowhere."""
    found = make_evidence()
    first = {**found.driver_log[0], "tasks": [report(0, rows=17), report(1)]}
    found.driver_log.insert(0, first)
    found.spark.tasks.extend([TaskResult(1, 4.0, 1000), TaskResult(1, 4.0, 1000)])
    assert "rows" not in list_failed(found)
    found.driver_log[1]["tasks"][0]["rows"] = 9
    assert "rows" in list_failed(found)


@pytest.mark.parametrize(
    "change",
    [
        {"rows": 9},  # the sum is not what was read
        {"pid": 10},  # the driver reports
        {"parent": 20},  # the parent is no daemon of Spark
    ],
)
def test_rows_are_those_of_workers(change: dict[str, int]) -> None:
    """All rows that were read, by workers below a daemon of Spark."""
    found = make_evidence()
    found.driver_log[0]["tasks"][1] |= change
    assert "rows" in list_failed(found)


def test_rows_must_have_been_fetched() -> None:
    """A worker that reports rows and has asked the store for none was sent them."""
    found = make_evidence()
    del found.requests[1]
    assert list_failed(found) == ["rows"]


def test_no_report_fails() -> None:
    """A driver without tasks."""
    found = make_evidence()
    del found.driver_log[0]
    assert run_checks(found)["rows"] == ["no task reported; 20 rows were read"]


def test_results_are_summed_by_epoch() -> None:
    """Two jobs of one epoch count together, those of the next do not."""
    found = make_evidence()
    half = RESULT_BOUND // 2
    found.spark.tasks += [TaskResult(1, 6.0, half), TaskResult(2, 12.0, half)]
    assert list_failed(found) == []
    found.spark.tasks.append(TaskResult(3, 7.0, half))
    assert list_failed(found) == ["results"]


def test_results_need_the_setting() -> None:
    """Spark itself has to refuse more."""
    found = make_evidence()
    found.spark.settings["spark.driver.maxResultSize"] = "1g"
    assert run_checks(found)["results"] == ["spark.driver.maxResultSize is 1g"]


def test_time_finds_the_unknown_process() -> None:
    """One that used no time, or little with the command of its parent, is a fork before its exec."""
    found = make_evidence()
    found.members.append(Seen(60, 10, 6, 0.0, "python", "unknown"))
    found.members.append(Seen(62, 10, 6, 0.05, "driver", "unknown", is_copy=True))
    assert list_failed(found) == []
    found.members.append(Seen(61, 10, 6, 0.5, "python side.py", "unknown"))
    assert list_failed(found) == ["time"]


def make_late_evidence(pid: int, **own: Any) -> Evidence:
    """The driver has waited for four seconds more than was seen, and one process is as given."""
    found = make_evidence()
    found.members[0] = replace(found.members[0], waited=8.0)
    place = [one.pid for one in found.members].index(pid)
    found.members[place] = replace(found.members[place], **own)
    return found


def test_time_finds_what_was_not_seen() -> None:
    """Processor time of processes that began and ended between two looks."""
    assert list_failed(make_late_evidence(10)) == ["time"]


def test_time_of_the_jvm_after_the_last_look_is_known() -> None:
    """On a busy machine looks are seconds apart, and the JVM works until it ends."""
    late = make_late_evidence(20, last_look=50.0, missed=54.0)
    assert list_failed(late) == []
    assert list_failed(make_late_evidence(20, last_look=50.0, missed=50.1)) == ["time"]


def test_workers_that_were_not_seen_are_known_by_their_daemon() -> None:
    """Only Spark forks below its daemon, which has waited for them."""
    assert list_failed(make_late_evidence(30, waited=4.0)) == []


def test_many_short_copies_are_found() -> None:
    """Each is below what a fork may use, all of them are not; also those of a detached parent."""
    found = make_evidence()
    found.members += [Seen(60 + one, 1, 6, 0.09, "", "unknown", is_copy=True) for one in range(30)]
    assert list_failed(found) == ["time"]


@pytest.mark.parametrize("change", [{"bytes": 30 * MEGABYTE}, {"task": 0}])
def test_division(change: dict[str, int]) -> None:
    """A task that is too large, and one that ran twice."""
    found = make_evidence()
    found.driver_log[0]["tasks"][1] |= change
    assert list_failed(found) == ["division"]


@pytest.mark.parametrize(("job", "size"), [("events", 40), ("merge", 20)])
def test_division_bounds_what_tasks_write(job: str, size: int) -> None:
    """Events are in ranges of about 32 MiB; other jobs have the bound of those that read."""
    found = make_evidence()
    tasks = [report(0), report(1, bytes=size // 2 * MEGABYTE)]
    found.driver_log.append({"event": "tasks_finished", "job": job, "slot": 1, "tasks": tasks})
    found.spark.tasks += [TaskResult(1, 6.0, 1000), TaskResult(1, 6.0, 1000)]
    assert list_failed(found) == []
    tasks[1]["bytes"] *= 2
    assert list_failed(found) == ["division"]


def test_division_knows_what_cannot_be_divided() -> None:
    """One task may read it, and no more than that; it excuses no other job."""
    found = make_evidence()
    found.driver_log[0]["tasks"][1]["bytes"] = 30 * MEGABYTE
    for job, size, failed in [
        ("inspect", 30, ["division"]),
        ("read", 20, ["division"]),
        ("read", 30, []),
    ]:
        place = replace(found.place, indivisible={job: {"inbox/1.csv.gz": size * MEGABYTE}})
        assert list_failed(replace(found, place=place)) == failed


def test_division_needs_the_stage() -> None:
    """Spark ran as many tasks as the driver reports."""
    found = make_evidence()
    found.spark.tasks.append(TaskResult(0, 5.0, 1))
    assert list_failed(found) == ["division"]


def test_division_believes_the_store() -> None:
    """A task that tells less than it has fetched."""
    found = make_evidence()
    found.requests.append(fetch(40, "task", 20 * MEGABYTE))
    assert list_failed(found) == ["division"]


def test_division_does_not_count_what_tasks_wrote() -> None:
    """The bytes of written files excuse no reads."""
    found = make_evidence()
    written = [report(0) | {"bytes": 15 * MEGABYTE}, report(1)]
    found.driver_log.append(
        {"event": "tasks_finished", "job": "events", "slot": 1, "tasks": written}
    )
    found.spark.tasks += [TaskResult(1, 5.0, 1000), TaskResult(1, 5.0, 1000)]
    assert list_failed(found) == []
    found.requests.append(fetch(40, "task", 15 * MEGABYTE))
    assert list_failed(found) == ["division"]


def test_an_event_log_is_read() -> None:
    """Settings, and the stage, end and result of each task; a lost task has no metrics."""
    ended = {"Event": "SparkListenerTaskEnd", "Stage ID": 3, "Task Info": {"Finish Time": 1500}}
    lines = [
        {"Event": "SparkListenerEnvironmentUpdate", "Spark Properties": {"a": "b"}},
        {**ended, "Task Metrics": {"Result Size": 7}},
        ended,
    ]
    found = read_event_log(map(json.dumps, lines))
    assert found == SparkLog({"a": "b"}, [TaskResult(3, 1.5, 7), TaskResult(3, 1.5, 0)])


@pytest.mark.parametrize(
    ("text", "expected"),
    [("16m", RESULT_BOUND), ("16777216", RESULT_BOUND), ("1g", 1 << 30), ("0", 0), ("x", None)],
)
def test_sizes_of_spark(text: str, expected: int | None) -> None:
    """As Spark's settings write them."""
    assert parse_size(text) == expected
