"""One quality run, from tables to the result and its pages in the bucket.

    <pipeline>/quality/docs/index.html               all runs, newest first
    <pipeline>/quality/docs/<run>/index.html         one run: every check and what was seen
    <pipeline>/quality/docs/<run>/<suite>.<summary>.html   GX's own page
    <pipeline>/quality/results/<run>.json latest.json      the same for machines
    <pipeline>/quality/history.json                  the runs the index lists; a cache, the results
    are the truth
    <pipeline>/quality/illness.json                  which epochs are ill, until retention

Great Expectations' pages load styles and scripts from eight foreign servers. They are replaced by
one style sheet: the pages must be readable behind a login, offline and in dark mode, and must not
show to other servers that they are read.
"""

from __future__ import annotations

import html
import math
import os
import re
import time
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from copy import deepcopy
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime, timedelta
from functools import partial
from importlib import resources
from typing import TYPE_CHECKING, Any, Protocol

import jinja2
import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc

from tidegate.checkpoints.bucket_layout import BucketLayout
from tidegate.checkpoints.canonical_json import canonical_bytes
from tidegate.checkpoints.driver_requests import DesiredState, read_desired_state
from tidegate.checkpoints.host_clock import SYSTEM_CLOCK, Clock
from tidegate.checkpoints.illness_record import (
    INTERVAL_VARIABLE,
    IllnessRecord,
    TimelineHealth,
    forget_retired,
    read_illness,
    replace_unreadable,
    write_illness,
)
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

from .epoch_slices import (
    MOST_SLICES,
    EpochSlice,
    Failure,
    SlicePlan,
    note_verdicts,
    plan_slices,
)
from .evidence import LATE_COLUMNS, Evidence, event_columns
from .gx_runner import (
    CheckResult,
    RunResult,
    format_number,
    load_great_expectations,
    run_suites,
)
from .job_batches import MOST_MANIFESTS, JobEvidence, count_slice_batches
from .suite_files import list_checked_tables, load_suites
from .summaries import count_closes

if TYPE_CHECKING:
    from great_expectations.core.expectation_validation_result import (
        ExpectationSuiteValidationResult,
    )

SCHEMA_VERSION = 1
_ABOUT_HEAD = "checkpoint_health"  # the summary that is about the newest checkpoint alone
_MANIFESTS_READ = 200  # of a slice, one GET each; a `recent_time` of a day may hold more epochs
_READER_THREADS = 8
_NO_EPOCH = 2**53  # no epoch has a higher number
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
        ConfigurationError: a suite is wrong.
        TransientError: the store or the catalog cannot be reached now.
    """
    # Its import is a part of the process's start, not of the check.
    load_great_expectations()
    begun = time.monotonic()
    record = read_illness(store, spec.name)
    if isinstance(spec, JobSpec):
        gathered = gather_batch_slices(spec, store, clock, record)
    else:
        read = read or _make_table_reader(spec, store)
        gathered = gather_slices(spec, store, read, record, clock)
    evidence = gathered.newest
    run = run_suites(evidence, gathered.older)
    record = _record_verdicts(store, spec.name, record, gathered, run)
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
        "judged_since": min([evidence.recent_since, *(e.recent_since for e in gathered.older)]),
        "slices": 1 + len(gathered.older),
        "every": _read_interval(),
        "verdict": run.verdict,
        "failed": [_dump_check(c) for c in run.failed_checks],
        "checks": [_dump_check(c) for c in run.checks],
        "illness": record.model_dump(mode="json"),
        "seconds": round(time.monotonic() - begun, 3),
    }
    publish_data_docs(store, result, run)
    return result


def _record_verdicts(
    store: Store, pipeline: str, record: IllnessRecord, gathered: Gathered, run: RunResult
) -> IllnessRecord:
    """Note which epochs the run has found ill, and forget those that retention has deleted."""
    # In place of the history of an older version, or of a damaged record.
    replace_unreadable(store, pipeline, record)
    if gathered.plan is not None:
        newest = run.newest or run.checks
        health = note_verdicts(
            gathered.health,
            gathered.plan,
            [_list_failures(checks) for checks in run.older],
            _list_failures(c for c in newest if c.summary != _ABOUT_HEAD),
            _list_failures(c for c in newest if c.summary == _ABOUT_HEAD),
        )
        write_illness(store, pipeline, gathered.timeline, health)
    forget_retired(store, SlotLog(store, pipeline))
    return read_illness(store, pipeline)


def _list_failures(checks: Iterable[CheckResult]) -> list[Failure]:
    """What is evidence against epochs: critical checks that ran and failed for some."""
    return [
        (c.id, *c.epochs)
        for c in checks
        if not c.passed and c.severity == "critical" and c.epochs and not c.trouble
    ]


def _read_interval() -> float | None:
    """Seconds between the runs that Airflow starts; None if it did not start this one."""
    return float(os.environ.get(INTERVAL_VARIABLE) or 0) or None


def _dump_check(check: CheckResult) -> JsonObject:
    listed = {name: list(getattr(check, name)) for name in ("offenders", "sample")}
    epochs = list(check.epochs) if check.epochs else None
    dumped = asdict(check) | listed | {"epochs": epochs, "page": check.page_name}
    del dumped["page_suffix"]
    return dumped


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


@dataclass(frozen=True)
class Gathered:
    """What one run looks at.

    Attributes:
        newest: evidence about the newest epochs.
        older: evidence about each of `SlicePlan.older`.
        plan: which epochs they are; None if nothing can be judged.
        timeline: of the newest epoch.
        health: what earlier runs have found on it, with the counters for this plan.
    """

    newest: Evidence | JobEvidence
    older: tuple[Evidence | JobEvidence, ...] = ()
    plan: SlicePlan | None = None
    timeline: int = 0
    health: TimelineHealth = field(default_factory=TimelineHealth)


def gather_batch_slices(
    spec: JobSpec, store: Store, clock: Clock, record: IllnessRecord
) -> Gathered:
    """Read the manifests of a job that no run has judged, and one slice before them.

    A slice has `quality.recent` batches of each query, at most 200 in all, or those of one
    `quality.recent_time`. Retired batches are left out.
    """
    log, now, quality = SlotLog(store, spec.name), clock.wall_ticks(), spec.quality
    head = log.head()
    size = count_slice_batches(spec, head.record)
    nothing = JobEvidence(spec, head.record, head.slot, (), now)
    if size == 0:
        return Gathered(nothing)
    health = _find_health(record, log, head.timeline)
    since = min(health.since, health.judged - size)
    kept = _find_first_kept(partial(_find_epoch_manifest, log, head), since, head.slot)
    first = max(kept, head.slot - MOST_SLICES * MOST_MANIFESTS) + 1
    slots = range(first, head.slot + 1)
    found = map_in_threads(partial(_find_epoch_manifest, log, head), slots, _READER_THREADS)
    manifests = [manifest for manifest in found if manifest is not None]
    epochs = [(manifest.slot, manifest.created_at) for manifest in manifests]
    plan = plan_slices(epochs, max(health.judged, first - 1), size, quality, now)
    plan = plan.separate_ill(health.ill)

    def cut(part: EpochSlice, *, is_older: bool = True) -> JobEvidence:
        own = [m for m in manifests if part.since < m.slot <= part.last][-MOST_MANIFESTS:]
        newest = own[-1] if own else head.record
        return JobEvidence(spec, newest, part.since, own, now, is_older)

    newest = cut(plan.newest, is_older=False)
    return Gathered(newest, tuple(map(cut, plan.older)), plan, head.timeline, health)


def _find_health(record: IllnessRecord, log: SlotLog, timeline: int) -> TimelineHealth:
    """What earlier runs have noted of a timeline; nothing of one that was never judged."""
    before = log.lineage(timeline)[-1].first - 1
    unjudged = TimelineHealth(since=before, judged=before, head=before, newest_since=before)
    return record.timelines.get(timeline, unjudged)


def gather_slices(
    spec: PipelineSpec,
    store: Store,
    read: TableReader,
    record: IllnessRecord,
    clock: Clock,
) -> Gathered:
    """Read all tables and manifests that the checks need.

    Of the tables only the epochs are read that no run has judged, and one slice before them. They
    are cut at the newest epoch of the checkpoints table, so that they fit together.

    Raises:
        ConfigurationError: a suite is wrong.
        TransientError: the store or the catalog cannot be reached now.
    """
    log, now = SlotLog(store, spec.name), clock.wall_ticks()
    sealed = log.head()
    health = _find_health(record, log, sealed.timeline)
    size, find_manifest = spec.quality.recent, partial(_find_epoch_manifest, log, sealed)
    since = min(health.since, health.judged - size)
    # With the epoch before it, whose retained rows the first row equation needs.
    view_since = max(0, since - 1)
    checkpoints = read(CHECKPOINTS, since=view_since)
    epoch = pc.max(checkpoints["_epoch"]).as_py() or 0
    head = find_manifest(epoch)
    if _is_catalog_behind(checkpoints, head, sealed, view_since):
        newest = _describe_behind(spec, read, now)
        return Gathered(newest)
    kept = _find_first_kept(find_manifest, since, epoch) if head else 0
    start = max(health.judged, kept)
    times = checkpoints["sealed_at"].cast(pa.timestamp("us", "UTC")).cast(pa.int64())
    epochs = sorted(zip(checkpoints["_epoch"].to_pylist(), times.to_pylist(), strict=True))
    plan = plan_slices([one for one in epochs if one[0] > kept], start, size, spec.quality, now)
    plan = plan.separate_ill(health.ill)
    if head is None:
        plan = replace(plan, slices=())
    totals = _count_totals(read, health, start)
    events_since = max(0, epoch - spec.quality.release_epochs)
    first_events = min([events_since, *(part.since for part in plan.older)])

    def read_cut(name: str, *, since: int = view_since, whole: bool = False) -> pa.Table:
        table = read(name, since=since, whole=whole)
        return table.filter(pc.less_equal(table["_epoch"], epoch))

    checked = list_checked_tables(load_suites(spec))
    first = min([plan.newest.since, *(part.since for part in plan.older)])
    tables = {name: read_cut(name, since=first, whole=True) for name in checked}
    manifests = _read_manifests(log, sealed, plan)
    events = read_cut(EVENTS, since=first_events)
    recent_since = plan.newest.since
    both = Evidence(
        spec=spec,
        late=read_cut(LATE),
        barriers=read_cut(BARRIERS),
        checkpoints=checkpoints,
        dead_letters=read_cut(DEAD_LETTERS),
        events=events,
        events_since=events_since,
        head=head,
        recent_since=recent_since,
        past=manifests.get(recent_since),
        manifests=[manifests[n] for n in range(recent_since + 1, epoch + 1) if n in manifests],
        rejections=read_cut(REJECTIONS) if spec.streams else None,
        tables=tables,
        sealed=sealed.slot,
        now=now,
        wanted=_is_checkpoint_due(store, spec.name, head),
        verified=str(verify_checkpoint(log, head.id, checksums=False).verdict) if head else "none",
        totals=totals,
        totals_upto=start,
        view_since=view_since,
    )
    older = tuple(both.cut_slice(manifests, part.since, part.last) for part in plan.older)
    newest = replace(
        both,
        events=_select_after(events, events_since),
        tables={name: _select_after(table, recent_since) for name, table in tables.items()},
    )
    counted = _advance_totals(totals, both, start, plan.judged)
    health = health.model_copy(update={"totals": counted})
    return Gathered(newest, older, plan if head else None, sealed.timeline, health)


def _is_catalog_behind(
    checkpoints: pa.Table, head: Manifest | None, sealed: LogHead, view_since: int
) -> bool:
    """Whether the tables still show what a restore has taken back, or lack what they have had."""
    if sealed.record is None:
        return bool(checkpoints.num_rows > 0)
    if checkpoints.num_rows == 0:
        return view_since > 0  # else nothing was published yet
    newest = checkpoints.sort_by([("_epoch", "descending")]).slice(0, 1)
    shown: str = newest["checkpoint_id"][0].as_py()
    return head is None or shown != str(head.id)


def _describe_behind(spec: PipelineSpec, read: TableReader, now: int) -> Evidence:
    """Evidence without any row: the tables do not show the current timeline."""

    def read_none(name: str, *, whole: bool = False) -> pa.Table:
        return read(name, since=_NO_EPOCH, whole=whole)

    return Evidence(
        spec=spec,
        late=read_none(LATE),
        barriers=read_none(BARRIERS),
        checkpoints=read_none(CHECKPOINTS),
        dead_letters=read_none(DEAD_LETTERS),
        events=read_none(EVENTS),
        events_since=0,
        head=None,
        past=None,
        sealed=0,
        now=now,
        wanted=False,
        verified="none",
        rejections=read_none(REJECTIONS) if spec.streams else None,
        tables={
            name: read_none(name, whole=True) for name in list_checked_tables(load_suites(spec))
        },
        tables_behind=True,
    )


def _select_after(table: pa.Table, epoch: int) -> pa.Table:
    return table.filter(pc.greater(table["_epoch"], epoch))


def _find_first_kept(
    find_manifest: Callable[[int], Manifest | None], since: int, epoch: int
) -> int:
    """The first epoch from `since` on whose manifest is kept; 0 if the log begins there.

    Counts are differences of two manifests.
    """
    since = max(since, 0)
    if since == 0 and find_manifest(1) is not None:
        return 0
    # Retirement goes from old to new, so that a bisection finds its end.
    older = range(max(since, 1), epoch)
    return older.start + bisect_left(older, True, key=lambda n: find_manifest(n) is not None)


def _read_manifests(log: SlotLog, head: LogHead, plan: SlicePlan) -> dict[int, Manifest]:
    """Read the manifests of all slices, of a long one the newest; retired ones are missing."""
    wanted = {0}
    for part in (*plan.older, plan.newest):
        first = max(part.since, part.last - _MANIFESTS_READ) + 1
        wanted |= {part.since, *range(first, part.last + 1)}
    found = map_in_threads(
        partial(_find_epoch_manifest, log, head), sorted(wanted), _READER_THREADS
    )
    return {n: one for n, one in zip(sorted(wanted), found, strict=True) if one is not None}


def _count_totals(read: TableReader, health: TimelineHealth, start: int) -> dict[str, int]:
    """The running counters up to an epoch: noted by an earlier run, else counted once."""
    if start == 0:
        return {}
    if health.totals and health.judged == start:
        return dict(health.totals)
    closes = count_closes(read(BARRIERS), 0, (0, start))
    checkpoints = pc.sum(pc.less_equal(read(CHECKPOINTS)["_epoch"], start)).as_py() or 0
    return {**closes, "checkpoints": checkpoints}


def _advance_totals(
    totals: Mapping[str, int], evidence: Evidence, start: int, judged: int
) -> dict[str, int]:
    """The running counters up to the end of the last slice."""
    added = Counter(count_closes(evidence.barriers, evidence.view_since, (start, judged)))
    epochs = evidence.checkpoints["_epoch"]
    new = pc.and_(pc.greater(epochs, start), pc.less_equal(epochs, judged))
    added["checkpoints"] = pc.sum(new).as_py() or 0
    return {name: totals.get(name, 0) + count for name, count in added.items()}


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
        rendered = view.render(renderer.render(_escape_validation(validation)))
        pages[name] = _clean_gx_page(rendered, f"{result['pipeline']}: {name}", result["at"])
    return pages


def _escape_validation(
    validation: ExpectationSuiteValidationResult,
) -> ExpectationSuiteValidationResult:
    """A copy whose texts are safe in HTML: GX's templates do not escape, and rows hold any text."""
    escaped = deepcopy(validation)
    for found in escaped.results:
        found.result = _escape_texts(found.result)
        found.exception_info = _escape_texts(found.exception_info)
        config: Any = found.expectation_config
        # The names of types and columns are in `kwargs`; none has a letter that is escaped, or it
        # comes from a suite file and is shown as it is written.
        config.kwargs = _escape_texts(config.kwargs)
        config.description = _escape_texts(config.description)
    return escaped


def _escape_texts(value: Any) -> Any:
    """The value with every text in it escaped, also in keys and in values of any other type."""
    if value is None or isinstance(value, bool | int | float):
        return value
    if isinstance(value, Mapping):
        return {_escape_texts(key): _escape_texts(one) for key, one in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [_escape_texts(one) for one in value]
    return html.escape(str(value))


def _clean_gx_page(page: str, title: str, at: str) -> str:
    """GX's page without what needs the network, scripts, or GX's own site around it."""
    body = page[page.index("<body>") + len("<body>") : page.rindex("</body>")]
    before = None
    while before != body:  # what is left may make the same again
        before = body
        for noise in _NOISE:
            body = re.sub(noise, "", body, flags=re.DOTALL)
    body = _SUITE_LINK.sub(r"\1", body)
    trail = f'<p class="trail"><a href="index.html">quality run of {html.escape(at)}</a></p>'
    head = f"<body>\n{trail}\n<h1>{html.escape(title)}</h1>\n"
    return _render_template("page.html", title=title).replace("<body>", head + body, 1)


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
    every = [c for checks in (*run.older, run.newest or run.checks) for c in checks]
    # Older versions read these; `illness.json` has them for this one.
    entry["recent_since"] = result.get("judged_since", entry["recent_since"])
    entry |= {
        "failed": [check["id"] for check in failed],
        "critical": [
            {"check": check, "epochs": epochs} for check, *epochs in _list_failures(every)
        ],
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
