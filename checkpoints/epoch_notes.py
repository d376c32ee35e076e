"""What an epoch or a merge notes in its manifest (`Manifest.notes`), typed.

`EpochNotes` is written and read here only, so that its keys are in one file.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Self

from tidegate.jobs.spec.event_time_options import OmittedIfEmpty, OmittedIfNone
from tidegate.json_types import JsonObject, JsonView

from .record_models import FrozenModel

if TYPE_CHECKING:
    from .manifest import Counters


@dataclass(frozen=True, slots=True)
class EpochCounters:
    """Rows of one epoch by disposition; `Counters` adds them up along a lineage.

    The row equation of ``docs/semantics.md``, section 6, for one epoch is ``read + retained_before
    = released + late + dropped + rejected + dead_lettered + rule_quarantined + filtered +
    retained``. Summed over a lineage, `retained_before` cancels out.

    Attributes:
        read: rows read, dead ones included.
        released: rows written to the events output.
        late: rows late for the events output; `late_by_output` counts lateness per window too.
        rejected: late rows that the `reject` policy set aside.
        dead_lettered: rows that could not be read or decoded.
        retained_before: rows in the order buffer before the epoch.
        retained: rows in the order buffer after the epoch.
        dropped: reason -> rows that the events dropped, by the `drop` policy or a row rule;
            counted only.
        late_by_output: output ("events" or a window) -> rows that were late for it; those that the
            events dropped are left out.
        windows: window -> results emitted (first emissions and revisions).
        per_source: source -> name of a count (`row_counts`) -> rows.
        rule_quarantined: rows that a row rule sent to the dead letters.
        filtered: rows that `where` of their source left out; counted only.
        dead_objects: objects that could not be read; counted apart, as their rows are unknown.
        overflowed: window -> results in which a sum is null because `long` does not hold it.
    """

    read: int = 0
    released: int = 0
    late: int = 0
    rejected: int = 0
    dead_lettered: int = 0
    retained_before: int = 0
    retained: int = 0
    dropped: dict[str, int] = field(default_factory=dict)
    late_by_output: dict[str, int] = field(default_factory=dict)
    windows: dict[str, int] = field(default_factory=dict)
    per_source: dict[str, dict[str, int]] = field(default_factory=dict)
    dead_objects: int = 0
    rule_quarantined: OmittedIfEmpty[int] = 0
    filtered: OmittedIfEmpty[int] = 0
    overflowed: OmittedIfEmpty[dict[str, int]] = field(default_factory=dict)

    def is_conserved(self) -> bool:
        """Return whether every row read, and every row buffered before, is counted once."""
        return self.read + self.retained_before == count_accounted_rows(self)


# Besides `dropped`, which counts by reason, and `retained`, which is not a flow.
COUNTED_ROWS = (
    "released", "late", "rejected", "dead_lettered", "rule_quarantined", "filtered",
)  # fmt: skip


def count_accounted_rows(counters: EpochCounters | Counters) -> int:
    """Return the number of rows with a disposition, the retained ones included."""
    flows: int = sum(getattr(counters, name) for name in COUNTED_ROWS)
    return flows + sum(counters.dropped.values()) + counters.retained


@dataclass(frozen=True)
class MergeSummary:
    """What a merge did; only manifests of merges have it.

    Attributes:
        request: id of the splice request.
        rows: rows of the request.
        digest: digest of the impact report.
        tables: table -> "added", "changed" and "removed" -> rows.
        who: who merged it.
        why: the reason this person gave.
    """

    request: str
    rows: int
    digest: str
    tables: dict[str, dict[str, int]]
    who: str
    why: str


# Manifests of earlier versions lack some of the notes.
_NOTHING_NOTED: JsonView = {
    "epoch": {},
    "next_position": 0,
    "released_max": None,
    "sketches": {},
    "bytes_written": 0,
    "streams": {},
    "savepoints": (),
    "aborted": (),
    "splice": None,
    "run": 0,
}


class EpochNotes(FrozenModel):
    """The notes of one manifest; those that most epochs do not use are left out there.

    No field has a default: each writer has to decide what a new field means for it.

    Attributes:
        epoch: rows of this epoch.
        next_position: position of the next released event.
        released_max: greatest (section, event time in ticks) released so far on the lineage; None
            before the first event.
        sketches: source -> lateness sketch of this epoch's rows, for `tidegate advise`.
        bytes_written: bytes of the files that the epoch wrote.
        streams: state of the streams and attachments; `DispatchState` reads it.
        savepoints: names under which the checkpoint has to be pinned.
        aborted: earlier attempts that lost their slots since the last sealed epoch.
        splice: what a merge did; None in the manifest of an epoch.
        run: the run that the epoch belongs to, see `DesiredDocument`.
    """

    epoch: EpochCounters
    next_position: int
    released_max: tuple[int, int] | None
    sketches: JsonObject
    bytes_written: int
    streams: OmittedIfEmpty[JsonObject]
    savepoints: tuple[str, ...]
    aborted: OmittedIfEmpty[tuple[str, ...]]
    splice: OmittedIfNone[MergeSummary]
    run: OmittedIfEmpty[int]

    @classmethod
    def from_record(cls, record: JsonView) -> Self:
        """Read `Manifest.notes`; what was not noted is zero, empty or None."""
        return cls.model_validate({**_NOTHING_NOTED, **record})
