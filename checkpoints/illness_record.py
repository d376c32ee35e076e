"""Which epochs the quality runs found ill: `illness.json`, for `recover_to: latest_healthy`.

A quality run judges the epochs since the previous run, in slices of `quality.recent`
(docs/quality.md). Each epoch is judged once. Ranges of ill epochs are kept until retention has
deleted their epochs, so that neither time nor later runs make an ill epoch healthy.

The record can be restored from the result of any later run, each of which has a copy. Light: no
pandas, no Great Expectations.
"""

from collections.abc import Iterable, Mapping
from datetime import datetime

from pydantic import Field

from tidegate.json_types import JsonObject

from .bucket_layout import BucketLayout, CheckpointId
from .canonical_json import parse_json
from .record_models import BucketRecord
from .shared_documents import SharedDocument, change_document, read_json_object
from .slot_index import SlotIndex
from .slot_log import SlotLog
from .store import NotFoundError, Store

_RESULTS_TRIED = 20  # newest ones, when the record is damaged; the newest readable one is taken


QUALITY_EVERY_SECONDS = 600.0
"""By default Airflow checks a pipeline at most once in so many seconds.

A run takes about ten seconds of one core, most of them for the import of Great Expectations, and
half a second for each slice.
"""
INTERVAL_VARIABLE = "TIDEGATE_QUALITY_EVERY"
"""Environment variable with the seconds between the runs that Airflow starts."""
_RUNS_MISSED = 3  # runs that may be missing before a verdict is stale


def is_verdict_stale(checked_at: float, sealed_at: float, every: float | None = None) -> bool:
    """Return whether epochs were sealed for several runs after a verdict, and none has judged them.

    Args:
        checked_at: time of the verdict, in seconds.
        sealed_at: when the newest epoch was sealed.
        every: seconds between two runs; None: Airflow's default.
    """
    return sealed_at - checked_at > _RUNS_MISSED * (every or QUALITY_EVERY_SECONDS)


def read_verdict(
    store: Store, pipeline: str, *, sealed_at: int | None, now: int
) -> JsonObject | None:
    """Return the newest verdict in short, with its age; None before the first.

    Args:
        store: the store.
        pipeline: its name.
        sealed_at: when the newest epoch was sealed, in ticks.
        now: ticks.
    """
    result = read_json_object(store, f"{BucketLayout(pipeline).quality_prefix}results/latest.json")
    try:
        at = datetime.fromisoformat(result["at"]).timestamp()
    except (KeyError, TypeError, ValueError):
        return None
    every = result.get("every")
    return {
        **{name: result.get(name) for name in ("at", "verdict", "checkpoint")},
        "age_seconds": round(max(0.0, now / 1e6 - at), 3),
        "stale": sealed_at is not None and is_verdict_stale(at, sealed_at / 1e6, every),
    }


class IllRange(BucketRecord):
    """Epochs `first` to `last` of a timeline, for which a critical check failed."""

    check: str
    first: int
    last: int


class TimelineHealth(BucketRecord):
    """What is known about the epochs of one timeline.

    Attributes:
        since: the newest epochs of the last run begin after this one.
        judged: epochs up to this one were judged.
        head: newest epoch that a run has looked at.
        newest_since: epochs from `judged` to this one were not looked at yet.
        ill: ranges in what was judged, in order.
        newest: ranges after `newest_since`; the next run replaces them.
        totals: running counters over the lineage up to `judged`.
    """

    since: int = 0
    judged: int = 0
    head: int = 0
    newest_since: int = 0
    ill: tuple[IllRange, ...] = ()
    newest: tuple[IllRange, ...] = ()
    totals: dict[str, int] = Field(default_factory=dict)

    def find_illness(self, slot: int) -> IllRange | None:
        """Return why an epoch is ill.

        An epoch that no run has judged yet continues the state of the last one before it.
        """
        slot = min(slot, self.head)
        if self.judged < slot <= self.newest_since:
            slot = self.judged
        ranges = (*self.newest, *self.ill)
        return next((one for one in ranges if one.first <= slot <= one.last), None)


class IllnessRecord(SharedDocument):
    """The health of all timelines; the content of `quality/illness.json`.

    Attributes:
        timelines: number of a timeline -> what is known about it.
        lost: the record was damaged and no result has a copy, so nothing is known.
    """

    timelines: dict[int, TimelineHealth] = Field(default_factory=dict)
    lost: bool = False

    def explain_illness(self, checkpoint: CheckpointId) -> str | None:
        """Return why the quality runs find a checkpoint unhealthy; None: healthy."""
        if self.lost:
            return "no one knows: the record of ill epochs is damaged, and a quality run renews it"
        own = self.timelines.get(checkpoint.timeline)
        found = own.find_illness(checkpoint.slot) if own else None
        if found is None:
            return None
        return f"check {found.check} failed for epochs {found.first} to {found.last}"


def add_range(ranges: Iterable[IllRange], new: IllRange) -> tuple[IllRange, ...]:
    """Return the ranges with another one; those of one check that touch become one."""
    first, last = new.first, new.last
    kept = []
    for one in ranges:
        touches = one.check == new.check and one.first <= last + 1 and first <= one.last + 1
        if touches:
            first, last = min(first, one.first), max(last, one.last)
        else:
            kept.append(one)
    merged = IllRange(check=new.check, first=first, last=last)
    return tuple(sorted((*kept, merged), key=lambda one: (one.first, one.last, one.check)))


def read_illness(store: Store, pipeline: str) -> IllnessRecord:
    """Return the record of ill epochs.

    Without one it is made of the history that older versions wrote. A damaged one is taken from the
    newest result that can be read.
    """
    quality = BucketLayout(pipeline).quality_prefix
    try:
        data = store.get(_build_key(pipeline)).data
    except NotFoundError:
        return _convert_history(store, quality)
    try:
        return IllnessRecord.model_validate(parse_json(data))
    except ValueError:
        return _find_copy(store, quality) or IllnessRecord(lost=True)


def write_illness(store: Store, pipeline: str, timeline: int, health: TimelineHealth) -> None:
    """Note what a run has found on one timeline; of two runs at once the farther one stays."""

    def note(record: IllnessRecord) -> IllnessRecord:
        there = record.timelines.get(timeline)
        if there and (there.judged, there.head) > (health.judged, health.head):
            return record
        return record.model_copy(update={"timelines": {**record.timelines, timeline: health}})

    _change_record(store, pipeline, note)


def replace_unreadable(store: Store, pipeline: str, record: IllnessRecord) -> None:
    """Write a record that was converted or restored, in place of a missing or damaged one."""
    key = _build_key(pipeline)
    try:
        IllnessRecord.model_validate(parse_json(store.get(key).data))
    except (NotFoundError, ValueError):
        store.put(key, record.model_copy(update={"lost": False}).to_bytes())


def forget_retired(store: Store, log: SlotLog) -> None:
    """Drop the ranges whose epochs retention has deleted."""
    index = SlotIndex(log)
    head = log.head().timeline

    def select(record: IllnessRecord) -> IllnessRecord:
        kept = {}
        for timeline, health in record.timelines.items():
            ill = health.ill
            if ill:
                rows = index.iterate_retained(timeline)
                oldest = next((row.slot for row in rows if row.kind == "epoch"), None)
                ill = tuple(one for one in ill if oldest is not None and one.last >= oldest)
            if ill or timeline == head or health.newest:
                kept[timeline] = health.model_copy(update={"ill": ill})
        return record.model_copy(update={"timelines": kept})

    _change_record(store, log.pipeline, select)


def _change_record(store: Store, pipeline: str, step: object) -> None:
    change_document(store, _build_key(pipeline), IllnessRecord(), step)  # type: ignore[arg-type]


def _build_key(pipeline: str) -> str:
    return f"{BucketLayout(pipeline).quality_prefix}illness.json"


def _find_copy(store: Store, quality: str) -> IllnessRecord | None:
    for name in _list_results(store, quality)[:_RESULTS_TRIED]:
        copy = read_json_object(store, name).get("illness")
        if copy:
            try:
                return IllnessRecord.model_validate(copy)
            except ValueError:
                continue
    return None


def _list_results(store: Store, quality: str) -> list[str]:
    """Keys of the results, newest first; their names are times."""
    keys = (entry.key for entry in store.list_objects(f"{quality}results/"))
    return sorted((key for key in keys if not key.endswith("/latest.json")), reverse=True)


# The history of older versions: up to 100 runs, each with the epochs of its critical failures.


def _convert_history(store: Store, quality: str) -> IllnessRecord:
    try:
        history = parse_json(store.get(f"{quality}history.json").data)
        runs = [*map(_parse_old_run, _list_judging(history["runs"]))]
    except NotFoundError:
        return IllnessRecord()
    except (ValueError, KeyError, TypeError):
        # The results are the truth that the history lists.
        results = [read_json_object(store, key) for key in _list_results(store, quality)]
        runs = [*map(_parse_old_run, _list_judging(map(_shorten_result, results)))]
        if not runs:
            return IllnessRecord(lost=True)
    by_timeline: dict[int, list[_OldRun]] = {}
    for run in runs:
        by_timeline.setdefault(run.timeline, []).append(run)
    return IllnessRecord(timelines={t: _join_runs(own) for t, own in by_timeline.items()})


class _OldRun(BucketRecord):
    timeline: int
    since: int
    slot: int
    at: str
    critical: tuple[IllRange, ...]


def _list_judging(runs: Iterable[JsonObject]) -> list[JsonObject]:
    return [run for run in runs if run.get("checkpoint")]


def _parse_old_run(entry: Mapping[str, object]) -> _OldRun:
    checkpoint = CheckpointId.parse(str(entry["checkpoint"]))
    critical = [
        IllRange(check=one["check"], first=one["epochs"][0], last=one["epochs"][1])
        for one in entry.get("critical", ())  # type: ignore[attr-defined]
    ]
    return _OldRun.model_validate(
        {
            "timeline": checkpoint.timeline,
            "slot": checkpoint.slot,
            "since": entry.get("recent_since", checkpoint.slot),
            "at": entry.get("id", ""),
            "critical": critical,
        }
    )


def _shorten_result(result: JsonObject) -> JsonObject:
    """A result as its entry of the history."""
    failed = [c for c in result.get("failed", ()) if c.get("severity") == "critical"]
    critical = [{"check": c["id"], "epochs": c["epochs"]} for c in failed if c.get("epochs")]
    return {**result, "critical": critical}


def _join_runs(runs: list[_OldRun]) -> TimelineHealth:
    """What runs said that each judged its newest epochs anew: of each epoch the newest run."""
    runs = sorted(runs, key=lambda run: (run.slot, run.at, not run.critical), reverse=True)
    newest = runs[0]
    ill: tuple[IllRange, ...] = ()
    below = newest.slot + 1  # epochs from here on were judged by a newer run
    for run in runs:
        end = below - 1
        for one in run.critical:
            # What follows the run's newest epoch continues its state.
            last = end if one.last >= run.slot else min(one.last, end)
            first = max(one.first, run.since + 1)
            if first <= last:
                ill = add_range(ill, IllRange(check=one.check, first=first, last=last))
        below = min(below, run.since + 1)
    judged = newest.slot
    return TimelineHealth(
        since=newest.since, judged=judged, head=judged, newest_since=judged, ill=ill
    )
