"""Streams in every state that the Streams page can show, served without Airflow.

`states.py` says how a browser reaches each state.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from tests.cli.shop import OBJECTS, Shop
from tests.cli.shop import SPEC as SHOP_SPEC
from tests.operators.history import GALLERY, SECOND, History, drives, drove, gallery, keep_spec
from tests.operators.pages import FakeAirflowQueries, app_of, served
from tests.sealed_queries.conftest import JobBench
from tests.servers.memory_store import Fault, MemoryStore
from tidegate.checkpoints.batch_notes import BatchReport, SinkRewind, SourceProgress
from tidegate.checkpoints.bucket_layout import BucketLayout
from tidegate.checkpoints.checkpoint_specs import write_spec
from tidegate.checkpoints.driver_requests import DesiredState
from tidegate.checkpoints.local_store import LocalStore
from tidegate.checkpoints.pins import RootsFile
from tidegate.checkpoints.restore import RestoreEvent, record_restore_event
from tidegate.checkpoints.store import Store
from tidegate.jobs.spec.loader import parse_spec

# In transition, in trouble, or with names that need room.
MORE_STREAMS: Final = (
    *("buses", "ferries", "trains", "trams", "rivers", "first"),
    "warehouse_temperature_sensors_of_the_northern_halls",
)
_SPEC_LINES = ["name: meters", *(f"# {n}" for n in range(2, 12)), "  rules: {no: 1}", "# the end"]


@dataclass
class Scene:
    """The addresses of the page.

    Attributes:
        page: all streams, for a user who may do everything.
        viewer: the same streams, for a user who may only look.
        empty: an Airflow without pipelines.
        away: streams whose store does not answer.
        tables: one stream with real tables.
        job: one job, of `kind: job`.
        desk: what Airflow says to `page`.
    """

    page: str
    viewer: str
    empty: str
    away: str
    tables: str
    job: str
    store: MemoryStore
    desk: FakeAirflowQueries

    def begin_start(self) -> None:
        """Let someone ask now for a start: `buses` is starting for the next three minutes."""
        History(self.store, "buses").wanted(DesiredState.RUN)


@contextmanager
def served_scene(folder: Path) -> Iterator[Scene]:
    """Everything, until the block ends.

    Args:
        folder: an empty folder for what cannot be in memory.
    """
    store = MemoryStore()
    gallery(store, 40)
    _add_streams(store)
    names = [*GALLERY, *MORE_STREAMS]
    desk = FakeAirflowQueries(names, store, paused=["orders"])
    desk.shown = _list_runs(time.time_ns() // 1_000_000)
    desk.past = [run for run in desk.shown if run["ended"]]
    desk.broken = [
        "- /specs/shop.yaml:30: windows.w.latness: unknown field, did you mean 'lateness'?",
        "/specs/a_very_long_name_of_a_file.yaml:31: not valid YAML: a tab",
    ]
    viewer = FakeAirflowQueries(names, store, may=[], paused=["orders"])
    viewer.shown = [_refuse(run) for run in desk.shown]
    away = MemoryStore(store.bucket, hook=lambda request: Fault.REFUSED)
    specs = folder / "specs"
    specs.mkdir()
    (specs / "meters.yaml").write_text("\n".join(_SPEC_LINES))
    os.environ["TIDEGATE_PIPELINES"] = str(specs)
    desks = [
        *(desk, viewer, FakeAirflowQueries([], store), FakeAirflowQueries(GALLERY, away)),
        FakeAirflowQueries(["shop"], _run_shop(folder)),
        FakeAirflowQueries(["clicks"], _run_job(folder / "job")),
    ]
    with ExitStack() as servers:
        urls = [servers.enter_context(served(app_of(one))) for one in desks]
        page, viewer_page, empty, unreachable, tables, job = urls
        yield Scene(page, viewer_page, empty, unreachable, tables, job, store, desk)


def _add_streams(store: MemoryStore) -> None:
    buses, ferries, trains, trams, rivers, first = (
        History(store, name, ("one", "two")) for name in MORE_STREAMS[:6]
    )
    for history in (buses, trains):
        history.extend(30, ago=300)
        drove(store, history.pipeline)
    trains.wanted(DesiredState.RECOVERING, "a bad file came in")
    for history, length in ((ferries, 35), (trams, 30), (rivers, 35), (first, 0)):
        history.extend(length)
        drives(store, history.pipeline)
        history.wanted(DesiredState.RUN)
    ferries.wanted(DesiredState.STOPPED, "release 7")
    ferries.says("running")
    trams.says("draining", why="a restore asks for it", unpublished=3)
    rivers.says(
        "running",
        unpublished=40,
        trouble={"message": "the catalog is away"},
        silent={"two": 7_500 * SECOND},
        stale={"one": 95.2},
        lag={"one/0": 12_345, "two/0": 4},
        late_uploads={"one": 3},
        freshness={"one": {"sealed": [1.4, 2.9, 4.2], "visible": [2.2, 95.2, 140.0]}},
    )
    first.says("starting", why="Spark is starting")
    wide = History(store, MORE_STREAMS[6], [f"hall_{n}_sensors_of_row_{n}" for n in range(12)])
    at = wide.extend(40)[20].id
    drives(store, wide.pipeline)
    wide.wanted(DesiredState.RUN)
    wide.says("running")
    for history in (buses, ferries, trains, trams, rivers, wide):
        keep_spec(history)
    pinned = ferries.log.head().record
    assert pinned is not None
    pin = {"who": "ann", "why": "known to be good"}
    RootsFile(store, "ferries").pin("before_the_release", pinned.id, **pin)
    for step, who in ((RestoreEvent.ASKED, "ann"), (RestoreEvent.REJECTED, "uwe")):
        facts = {"target": str(at), "why": "a bad file came in"}
        record_restore_event(store, wide.pipeline, "r1", step, who=who, **facts)
    log = BucketLayout("meters").attempt_logs_prefix("20260101-a") + "000000.log"
    lines = [f"20:00:{n:02} INFO epoch {n} sealed in 0.8 s, 190 rows read" for n in range(30)]
    store.put(log, "\n".join([*lines, "20:00:31 ERROR row 17 breaks rule no"]).encode())


def _list_runs(now: int) -> list[dict[str, Any]]:
    """Runs of DAGs: one waits for a person, one failed, one goes on."""
    wide, body = MORE_STREAMS[6], "**Taken back**: 31 epochs, everything since 20:00:00 UTC"
    question = {
        "task": "approve",
        "subject": "Restore taxis?",
        "body": f"{body}\n\n```\nread 5,890\nlate 140\n```",
        "options": ["Approve", "Reject"],
        "assigned": [],
        "since": now - 120_000,
        "refusal": None,
    }
    tasks = [{"task": "check", "state": "success"}, {"task": "stop", "state": "running"}]

    def run(pipeline: str, kind: str, state: str, **facts: Any) -> dict[str, Any]:
        fixed = {"kind": kind, "dag_id": f"{pipeline}.{kind}", "run_id": "r1", "state": state}
        ended = None if state == "running" else now - 300_000
        times = {"who": "ann", "at": now - 330_000, "ended": ended}
        return {**fixed, **times, "conf": {}, "tasks": [], "question": None, **facts}

    return [
        run("taxis", "recover", "running", question=question),
        run("trains", "recover", "running", conf={"checkpoint": "t0-000012"}, tasks=tasks),
        run(wide, "recover", "failed", conf={"checkpoint": "t0-000021", "dry_run": True}),
        run("flights", "recover", "success", conf={"reason": "a bad file came in"}),
        run("flights", "stop", "failed", run_id="r2", conf={"reason": "release 7"}),
    ]


def _refuse(run: dict[str, Any]) -> dict[str, Any]:
    refusal = "you have no right in Airflow to answer"
    return run | {"question": run["question"] and run["question"] | {"refusal": refusal}}


def _run_shop(folder: Path) -> Store:
    """A stream with real tables, late rows and a dead letter."""
    shop = Shop(LocalStore(folder / "store"), parse_spec(SHOP_SPEC), folder)
    write_spec(shop.store, shop.spec)
    for number, rows in enumerate(OBJECTS):
        shop.put(number, rows)
    shop.run()
    return shop.store


def _run_job(folder: Path) -> MemoryStore:
    """A job with two queries: one whose sink can be taken back, one that repeats batches."""
    bench, at = JobBench(folder), 1_357_000_000 * SECOND
    for name, rewind in (("counts", SinkRewind.REPEAT), ("copies_of_raw_events", SinkRewind.LOG)):
        query, made = bench.query(name, rewind)
        for batch in range(4):
            made.commit(batch)
            progress = SourceProgress(name="kafka[clicks]", rows=1_200, backlog=345)
            report = BatchReport(
                sink="ForeachBatchSink",
                watermark=at + batch * SECOND,
                rows=1_200,
                dropped=7,
                state_rows=4_100,
                state_bytes=2_500_000,
                sources=(progress,),
                phases={"addBatch": 0.8, "walCommit": 0.1},
            )
            bench.sealer.seal(query, batch, report)
    History(bench.store, "clicks").wanted(DesiredState.RUN)
    return bench.store
