"""One quality run, from tables to the result and its pages in the bucket.

    <pipeline>/quality/docs/index.html               all runs, newest first
    <pipeline>/quality/docs/<run>/index.html         one run: every check and what was seen
    <pipeline>/quality/docs/<run>/<suite>.<summary>.html   GX's own page
    <pipeline>/quality/results/<run>.json latest.json      the same for machines
    <pipeline>/quality/history.json                  the runs the index lists; a cache, the results
    are the truth

Great Expectations' pages load styles and scripts from eight foreign servers. They are replaced by
one style sheet: the pages must be readable behind a login, offline and in dark mode, and must not
show to other servers that they are read.
"""

from __future__ import annotations

import math
import re
import time
from bisect import bisect_left
from dataclasses import asdict
from datetime import UTC, datetime, timedelta
from functools import partial
from importlib import resources
from typing import Any, Protocol

import jinja2
import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc

from tidegate.checkpoints.bucket_layout import BucketLayout
from tidegate.checkpoints.canonical_json import canonical_bytes
from tidegate.checkpoints.driver_requests import DesiredState, read_desired_state
from tidegate.checkpoints.host_clock import SYSTEM_CLOCK, Clock
from tidegate.checkpoints.lease import read_lease
from tidegate.checkpoints.manifest import Manifest
from tidegate.checkpoints.shared_documents import read_json_object
from tidegate.checkpoints.slot_log import LogHead, SlotLog
from tidegate.checkpoints.store import Store, map_in_threads
from tidegate.checkpoints.verify import verify_checkpoint
from tidegate.jobs.spec.job_spec import JobSpec
from tidegate.jobs.spec.pipeline import (
    BARRIERS,
    CHECKPOINTS,
    DEAD_LETTERS,
    EVENTS,
    LATE,
    PipelineSpec,
)
from tidegate.jobs.spec.stream_specs import REJECTIONS
from tidegate.json_types import JsonObject, JsonView

from .evidence import LATE_COLUMNS, Evidence, event_columns
from .gx_runner import (
    CheckResult,
    RunResult,
    format_number,
    load_great_expectations,
    run_suites,
)
from .job_batches import JobEvidence, gather_batches
from .suite_files import list_checked_tables, load_suites

SCHEMA_VERSION = 1
_MANIFESTS_READ = 200  # one GET each; a `recent_time` of a day may hold many more epochs
_UNIX_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_RUNS_KEPT = 100  # runs listed and kept, with results and Data Docs; about 0.3 MB each
_WRITER_THREADS = 8  # pages are written side by side: a PUT is mostly waiting
_ROWS_SHOWN = 50  # rows of a summary on the run's page

# Removed one after another from a page of GX.
_NOISE = (
    r"<script\b.*?</script>",
    r"<link\b[^>]*>",
    r"<style\b.*?</style>",
    # The navigation around the page, and its sidebar.
    r'<nav class="navbar.*?</nav>\s*</div>\s*</nav>|<footer>.*?</footer>',
    r'<div class="col-lg-2.*?(?=<div class="col-md-10)',
    # Buttons and code that select the rows in a notebook.
    r'<p class="m-0">\s*<a data-toggle="collapse".*?</a>\s*</p>|<code\s*>\s*df\.filter.*?</code>',
    r"Data asset: None<br>",
)
_SUITE_LINK = re.compile(r'<a href="[./]*expectations/[^"]*"\s*>(.*?)</a>', re.DOTALL)


def check_quality(
    spec: PipelineSpec | JobSpec,
    store: Store,
    *,
    read: TableReader | None = None,
    clock: Clock = SYSTEM_CLOCK,
) -> JsonObject:
    """Run every suite, put result and Data Docs into the store, and return the result.

    The result's ``verdict`` is ``pass``, ``warn`` or ``fail``; ``checkpoint`` is the newest one
    that was looked at (None before the first), so that ``recover_to: latest_healthy`` can tell
    which checkpoints were found healthy; ``key`` and ``docs`` are store keys.

    Raises:
        ConfigurationError: a suite is wrong, or a check cannot be computed.
        TransientError: the store or the catalog cannot be reached now.
    """
    # Its import is a part of the process's start, not of the check.
    load_great_expectations()
    begun = time.monotonic()
    evidence: Evidence | JobEvidence
    if isinstance(spec, JobSpec):
        evidence = gather_batches(spec, store, clock)
    else:
        read = read or _make_table_reader(spec, store)
        evidence = gather_evidence(spec, store, read, clock=clock)
    run = run_suites(evidence)
    at = _UNIX_EPOCH + timedelta(microseconds=evidence.now)
    name, quality = at.strftime("%Y%m%dT%H%M%S.%fZ"), BucketLayout(spec.name).quality_prefix
    head = evidence.head
    result: JsonObject = {
        "schema_version": SCHEMA_VERSION,
        "kind": "quality",
        "id": name,
        "key": f"{quality}results/{name}.json",
        "docs": f"{quality}docs/{name}/index.html",
        "pipeline": spec.name,
        "at": at.isoformat(timespec="seconds").replace("+00:00", "Z"),
        "checkpoint": str(head.id) if head else None,
        "timeline": head.timeline if head else None,
        "epoch": head.slot if head else None,
        "recent_since": evidence.recent_since,
        "verdict": run.verdict,
        "failed": [_dump_check(c) for c in run.failed_checks],
        "checks": [_dump_check(c) for c in run.checks],
        "seconds": round(time.monotonic() - begun, 3),
    }
    publish_data_docs(store, result, run)
    return result


def _dump_check(check: CheckResult) -> JsonObject:
    listed = {name: list(getattr(check, name)) for name in ("offenders", "sample")}
    epochs = list(check.epochs) if check.epochs else None
    return asdict(check) | listed | {"epochs": epochs, "page": check.page_name}


def _make_table_reader(spec: PipelineSpec, store: Store) -> TableReader:
    # Arrow and DuckDB take a second to import.
    from tidegate.jobs.sinks.published_tables import RowSelection, scan_table

    # The two tables that may be large are read without the user's columns.
    narrow = {EVENTS: event_columns(spec), LATE: LATE_COLUMNS}

    def read_run_rows(name: str, *, since: int = 0, whole: bool = False) -> pa.Table:
        # What was merged in later is not the run's doing: the checks judge the run.
        columns = None if whole else narrow.get(name)
        selection = RowSelection(since=since, columns=columns, spliced=False)
        return scan_table(spec, store, name, selection)

    return read_run_rows


# Gather what the checks look at: the tables up to one epoch, and the manifests that belong to it.


class TableReader(Protocol):
    """Reads one output table."""

    def __call__(self, name: str, *, since: int = 0, whole: bool = False) -> pa.Table:
        """Its rows of epochs after `since`; empty, with its columns, before the first epoch.

        Without `whole`, columns that no built-in check needs may be left out.
        """


def gather_evidence(
    spec: PipelineSpec, store: Store, read: TableReader, *, clock: Clock = SYSTEM_CLOCK
) -> Evidence:
    """Read all tables and manifests that the checks need.

    The tables are cut at the newest epoch of the checkpoints table, so that they fit together.

    Raises:
        ConfigurationError: a suite is wrong.
        TransientError: the store or the catalog cannot be reached now.
    """
    log = SlotLog(store, spec.name)
    sealed = log.head()
    checkpoints = read(CHECKPOINTS)
    epoch = pc.max(checkpoints["_epoch"]).as_py() or 0
    head = _find_epoch_manifest(log, sealed, epoch)
    events_since = max(0, epoch - spec.quality.release_epochs)
    now = clock.wall_ticks()
    recent_since, past = _find_recent_start(log, sealed, checkpoints, spec, now)

    def read_cut(name: str, *, since: int = 0, whole: bool = False) -> pa.Table:
        table = read(name, since=since, whole=whole)
        return table.filter(pc.less_equal(table["_epoch"], epoch))

    return Evidence(
        spec=spec,
        late=read_cut(LATE),
        barriers=read_cut(BARRIERS),
        checkpoints=checkpoints,
        dead_letters=read_cut(DEAD_LETTERS),
        events=read_cut(EVENTS, since=events_since),
        events_since=events_since,
        head=head,
        recent_since=recent_since,
        past=past,
        manifests=_read_recent_manifests(log, sealed, recent_since, epoch),
        rejections=read_cut(REJECTIONS) if spec.streams else None,
        tables={
            name: read_cut(name, since=recent_since, whole=True)
            for name in list_checked_tables(load_suites(spec))
        },
        sealed=sealed.slot,
        now=now,
        wanted=_is_checkpoint_due(store, spec.name, head),
        verified=str(verify_checkpoint(log, head.id, checksums=False).verdict) if head else "none",
    )


def _find_recent_start(
    log: SlotLog, head: LogHead, checkpoints: pa.Table, spec: PipelineSpec, now: int
) -> tuple[int, Manifest | None]:
    """The epoch after which epochs are recent, with its manifest.

    If that epoch was retired, the oldest manifest that is left begins the recent epochs.
    """
    newest = pc.max(checkpoints["_epoch"]).as_py() or 0
    if spec.quality.recent_time is None:
        first = max(0, newest - spec.quality.recent)
    else:
        sealed_at = checkpoints["sealed_at"].cast(pa.timestamp("us", "UTC")).cast(pa.int64())
        old = checkpoints.filter(pc.less_equal(sealed_at, now - spec.quality.recent_time))
        first = pc.max(old["_epoch"]).as_py() or 0
    if first == 0:
        return 0, None
    # Retirement goes from old to new, so that a bisection finds its end.
    find_manifest = partial(_find_epoch_manifest, log, head)
    older = range(first, newest)
    first += bisect_left(older, True, key=lambda epoch: find_manifest(epoch) is not None)
    return first, find_manifest(first)


def _read_recent_manifests(
    log: SlotLog, head: LogHead, since: int, epoch: int
) -> tuple[Manifest, ...]:
    first = max(since, epoch - _MANIFESTS_READ) + 1
    slots = log.epochs_between(head.timeline, first, epoch)
    return tuple(slot.record for slot in slots if isinstance(slot.record, Manifest))


def _find_epoch_manifest(log: SlotLog, head: LogHead, epoch: int) -> Manifest | None:
    """The manifest of one epoch on the current lineage.

    None before the first, and for a retired one.
    """
    if head.record is not None and head.slot == epoch:
        return head.record
    filled = next(log.epochs_between(head.timeline, epoch, epoch), None) if epoch > 0 else None
    return filled.record if filled is not None and isinstance(filled.record, Manifest) else None


def _is_checkpoint_due(store: Store, pipeline: str, head: Manifest | None) -> bool:
    """It should run or is driven, and rows were waiting when the newest checkpoint was sealed.

    The next one is due.

    A stream with nothing to read seals nothing, however healthy it is.
    """
    lease = read_lease(store, pipeline)
    driven = lease is not None and lease.holder is not None
    running = driven or read_desired_state(store, pipeline).state is DesiredState.RUN
    return running and head is not None and any(part.get("pending") for part in head.cut.values())


# Data Docs: Great Expectations' pages without CDNs, and an index.


def publish_data_docs(store: Store, result: JsonView, run: RunResult) -> str:
    """Write pages and results into the store, the newest pointers last.

    Results and pages of runs before the newest 100 are deleted. Return the key of the result.
    """
    quality = BucketLayout(result["pipeline"]).quality_prefix
    folder = f"{quality}docs/{result['id']}/"
    pages = _render_run_pages(result, run)
    map_in_threads(
        lambda name: store.put(f"{folder}{name}.html", pages[name].encode()),
        pages,
        _WRITER_THREADS,
    )
    key = f"{quality}results/{result['id']}.json"
    data = canonical_bytes(dict(result))
    store.put(key, data)
    # After the result: history and index name only runs whose pages are there.
    runs = _add_run_to_history(store, quality, result, run)
    title = f"Quality of {result['pipeline']}"
    index = _render_template("index.html", title=title, pipeline=result["pipeline"], runs=runs)
    store.put(f"{quality}docs/index.html", index.encode())
    # Last, because programs that read the newest result begin here.
    store.put(f"{quality}results/latest.json", data)
    return key


def _render_run_pages(result: JsonView, run: RunResult) -> dict[str, str]:
    """File name (without .html) -> page of one run."""
    from great_expectations.render.renderer.page_renderer import ValidationResultsPageRenderer
    from great_expectations.render.view.view import DefaultJinjaPageView

    # Untyped; one for all pages, since it compiles its templates each time.
    view: Any = DefaultJinjaPageView()
    renderer = ValidationResultsPageRenderer(run_info_at_end=True)
    pages = {"index": _render_run_index(result, run)}
    for name, validation in run.validations.items():
        validation.meta["run_id"] = {"run_name": result["pipeline"], "run_time": result["at"]}
        pages[name] = _clean_gx_page(
            view.render(renderer.render(validation)), f"{result['pipeline']}: {name}", result["at"]
        )
    return pages


def _clean_gx_page(page: str, title: str, at: str) -> str:
    """GX's page without what needs the network, scripts, or GX's own site around it."""
    body = page[page.index("<body>") + len("<body>") : page.rindex("</body>")]
    for noise in _NOISE:
        body = re.sub(noise, "", body, flags=re.DOTALL)
    body = _SUITE_LINK.sub(r"\1", body)
    trail = f'<p class="trail"><a href="index.html">quality run of {at}</a></p>'
    return _render_template("page.html", title=title).replace(
        "<body>", f"<body>\n{trail}\n<h1>{title}</h1>\n{body}"
    )


def _render_run_index(result: JsonView, run: RunResult) -> str:
    title = f"Quality of {result['pipeline']}: {result['verdict']}"
    frames = {name: _select_shown_rows(frame) for name, frame in run.frames.items()}
    return _render_template(
        "run.html", title=title, result=result, titles=run.titles, frames=frames
    )


def _select_shown_rows(frame: pd.DataFrame) -> JsonObject:
    newest = frame.tail(_ROWS_SHOWN).iloc[::-1] if len(frame) > _ROWS_SHOWN else frame
    rows = [[_format_frame_cell(value) for value in row] for row in newest.itertuples(index=False)]
    return {"columns": list(frame.columns), "rows": rows, "more": len(frame) - len(rows)}


def _format_frame_cell(value: Any) -> str:
    if isinstance(value, float):
        return "–" if math.isnan(value) else format_number(value)
    return str(value)


def _add_run_to_history(
    store: Store, quality: str, result: JsonView, run: RunResult
) -> list[JsonObject]:
    """Add the run to the history and drop the pages of what falls out of it.

    Of two runs at once one may be missing there.
    """
    key = f"{quality}history.json"
    # The history is a cache, so a damaged one starts again without runs.
    before = read_json_object(store, key).get("runs", ())
    entry = {k: result.get(k) for k in ("id", "at", "verdict", "checkpoint", "recent_since")}
    failed = result["failed"]
    critical = [c for c in run.failed_checks if c.severity == "critical" and c.epochs]
    entry |= {
        "failed": [check["id"] for check in failed],
        "critical": [{"check": c.id, "epochs": c.epochs} for c in critical],
        "values": {c.id: c.value for c in run.checks if c.value is not None},
    }
    runs = [entry, *before]
    for old in runs[_RUNS_KEPT:]:
        for page in list(store.list_objects(f"{quality}docs/{old['id']}/")):
            store.delete(page.key)
        store.delete(f"{quality}results/{old['id']}.json")
    runs = runs[:_RUNS_KEPT]
    store.put(key, canonical_bytes({"format_version": 1, "runs": runs}))
    return runs


def _render_template(template: str, **values: Any) -> str:
    css = resources.files(__package__).joinpath("docs.css").read_text("utf-8")
    loader = jinja2.PackageLoader(__package__)
    environment = jinja2.Environment(loader=loader, autoescape=True)
    return environment.get_template(template).render(css=css, **values)
