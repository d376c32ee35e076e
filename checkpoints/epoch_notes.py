"""What an epoch or a merge notes in its manifest (`Manifest.notes`), typed.

`EpochNotes` is written and read here only, so that its keys are in one file.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Final, Self

from tidegate.json_types import JsonObject, JsonView

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
    rule_quarantined: int = 0
    filtered: int = 0

    @classmethod
    def from_record(cls, record: JsonView) -> Self:
        """Read the counters of a manifest; those it lacks are zero, unknown ones are ignored."""
        return cls(**{name: record[name] for name in cls.__dataclass_fields__ if name in record})

    def is_conserved(self) -> bool:
        """Return whether every row read, and every row buffered before, is counted once."""
        return self.read + self.retained_before == count_accounted_rows(self)

    def to_record(self) -> JsonObject:
        """Return the form in the manifest, without `rule_quarantined` and `filtered` if zero."""
        rare = ("rule_quarantined", "filtered")
        return {name: value for name, value in asdict(self).items() if value or name not in rare}


# Besides `dropped`, which counts by reason, and `retained`, which is not a flow.
COUNTED_ROWS: Final = (
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


@dataclass(frozen=True, kw_only=True)
class EpochNotes:
    """The notes of one manifest.

    No field has a default: each writer has to decide what a new field means for it.

    Attributes:
        counters: rows of this epoch.
        next_position: position of the next released event.
        released_max: greatest (section, event time in ticks) released so far on the lineage; None
            before the first event.
        sketches: source -> lateness sketch of this epoch's rows, for `tidegate advise`.
        bytes_written: bytes of the files that the epoch wrote.
        streams: state of the streams and attachments; `DispatchState` reads it.
        savepoints: names under which the checkpoint has to be pinned.
        aborted: earlier attempts that lost their slots since the last sealed epoch.
        merge: what a merge did; None in the manifest of an epoch.
        run: the run that the epoch belongs to, see `DesiredDocument`.
    """

    counters: EpochCounters
    next_position: int
    released_max: tuple[int, int] | None
    sketches: JsonObject
    bytes_written: int
    streams: JsonObject
    savepoints: tuple[str, ...]
    aborted: tuple[str, ...]
    merge: MergeSummary | None
    run: int

    @classmethod
    def from_record(cls, record: JsonView) -> Self:
        """Read `Manifest.notes`; what was not noted is zero, empty or None."""
        # Manifests of earlier versions lack some of the notes.
        released, merge = record.get("released_max"), record.get("splice")
        return cls(
            counters=EpochCounters.from_record(record.get("epoch") or {}),
            next_position=record.get("next_position", 0),
            released_max=(released[0], released[1]) if released else None,
            sketches=record.get("sketches") or {},
            bytes_written=record.get("bytes_written", 0),
            streams=record.get("streams", {}),
            savepoints=tuple(record.get("savepoints", ())),
            aborted=tuple(record.get("aborted", ())),
            merge=MergeSummary(**merge) if merge else None,
            run=record.get("run", 0),
        )

    def to_record(self) -> JsonObject:
        """Return the JSON-ready form; fields that most epochs do not use are left out."""
        return {
            "epoch": self.counters.to_record(),
            "next_position": self.next_position,
            "released_max": list(self.released_max) if self.released_max else None,
            "sketches": self.sketches,
            "bytes_written": self.bytes_written,
            "savepoints": list(self.savepoints),
            # Left out when empty: the bytes of a manifest without them must stay as they were.
            **({"streams": self.streams} if self.streams else {}),
            **({"aborted": list(self.aborted)} if self.aborted else {}),
            **({"splice": asdict(self.merge)} if self.merge else {}),
            **({"run": self.run} if self.run else {}),
        }
