"""Sealed epochs with what they started from: the ground of `replay`, `whatif` and `advise`.

From the same state, survey and spec the decider must come to the same decision (docs/semantics.md,
section 9.9). Manifests of format 2 hold the survey; for older ones a mover has to read the rows.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from tidegate.checkpoints.canonical_json import canonical_bytes, parse_json
from tidegate.checkpoints.checkpoint_specs import read_spec
from tidegate.checkpoints.manifest import Manifest
from tidegate.checkpoints.slot_log import SlotLog
from tidegate.checkpoints.store import Store
from tidegate.jobs.eventtime.decider import create_initial_state, decide
from tidegate.jobs.eventtime.decision_types import (
    BarrierOutcome,
    Decision,
    MemberSurvey,
    ReleaseMark,
    Survey,
)
from tidegate.jobs.eventtime.pipeline_clock import read_pipeline_time
from tidegate.jobs.spec.pipeline import PipelineSpec
from tidegate.json_types import JsonObject

from .errors import NO_OWN_SPEC
from .interfaces import Cut, Slice


@dataclass(frozen=True)
class RecordedEpoch:
    """A sealed epoch, and the one before it on its lineage.

    Attributes:
        spec: the spec that sealed it.
        manifest: the epoch.
        parent: the epoch or merge before it; None for the first.
        continues: an epoch was read before it, and nothing was retired in between.
    """

    spec: PipelineSpec
    manifest: Manifest
    parent: Manifest | None
    continues: bool = False

    @property
    def state_before(self) -> JsonObject:
        """The decider's state that the epoch started from."""
        return self.parent.decider if self.parent else create_initial_state(self.spec)

    @property
    def sealed_decision(self) -> Decision:
        """What was decided."""
        return Decision.from_record(self.manifest.decision, self.manifest.decider)

    def rebuild_cut(self) -> Cut:
        """Return what was read of the members known after the epoch, in the order of the survey.

        A manifest's cut also keeps the positions of members that are gone, and has no order.
        """
        live = self.manifest.decider["members"]
        cut = Cut.from_record({name: p for name, p in self.manifest.cut.items() if name in live})
        sources = list(self.spec.sources)

        def rank_slice(part: Slice) -> tuple[int, int, str]:
            """By source as in the spec, then by partition: of topics by number, else by name."""
            source, partition = part.member.source, part.member.partition
            is_topic = self.spec.sources[source].kafka is not None
            return sources.index(source), int(partition) if is_topic else -1, partition

        return Cut(tuple(sorted(cut.slices, key=rank_slice)))

    def read_survey(self) -> Survey | None:
        """Return the survey as the decider reads it; None if the manifest does not hold it."""
        record = self.manifest.survey
        if record is None:
            return None
        members = self.manifest.decider["members"]
        surveys = []
        for part in self.rebuild_cut().slices:
            name = str(part.member)
            known = MemberSurvey.from_record(part.member, record["members"].get(name, []))
            # What the rows leave for the next cut is in the decider's state.
            carried = members[name]["generator"]
            surveys.append(
                replace(
                    known,
                    pending=part.pending,
                    done=part.done,
                    punctuation_state=carried,
                    punctuation=(carried or {}).get("current"),
                )
            )
        return self.complete_survey(Survey(now=0, members=tuple(surveys)))

    @property
    def released_max(self) -> ReleaseMark | None:
        """Greatest mark of a row that left before the epoch."""
        released = self.parent.epoch_notes.released_max if self.parent else None
        return ReleaseMark(*released) if released else None

    def complete_survey(self, survey: Survey) -> Survey:
        """Complete a survey with what the epoch knew besides its rows, as the engine did."""
        epoch, parent = self.manifest, self.parent
        time = read_pipeline_time(epoch.decider)
        before = read_pipeline_time(parent.decider) if parent else None
        recorded = epoch.decision["recorded"]
        cancels = [one["id"] for one in recorded if one["kind"] == "cancel_barriers"]
        return replace(
            survey,
            # The wall clock as far as it was recorded. If it had gone back, it decided nothing.
            now=time.wall if time else epoch.recorded_now,
            worked=time.clock - before.clock if time and before else None,
            buffered_rows=parent.counters.retained if parent else 0,
            released_max=self.released_max,
            aborts=self._list_requested_aborts(max(cancels, default=None)),
            cancels=tuple(cancels),
            ctis=tuple((one["source"], one["time"]) for one in recorded if one["kind"] == "cti"),
            run_start=parent is None or epoch.epoch_notes.run > parent.epoch_notes.run,
        )

    def _list_requested_aborts(self, cancelled: int | None) -> tuple[int, ...]:
        """The barriers that someone asked to abort; those up to `cancelled` were cancelled."""
        epoch = self.manifest
        if epoch.survey is not None:
            return tuple(epoch.survey.get("aborts", ()))
        # Older manifests have no survey. A request that mattered shows in what became of them.
        aborted = (
            one["id"] for one in epoch.barriers if one.get("outcome") == BarrierOutcome.ABORTED
        )
        return tuple(number for number in aborted if cancelled is None or number > cancelled)

    def decide_again(self, survey: Survey) -> tuple[Decision, tuple[str, ...]]:
        """Decide as the epoch did; also return the fields that come out differently.

        `after` among them is the decider's state.

        Raises:
            PoisonError: as `decide`.
        """
        decided = decide(self.spec, self.state_before, survey)
        return decided, self._compare_decision(decided)

    def _compare_decision(self, decided: Decision) -> tuple[str, ...]:
        record, sealed = decided.to_record(), self.manifest.decision
        # The usual case, without the way through canonical JSON.
        if decided.after == self.manifest.decider and record == sealed:
            return ()
        one = _normalize_decision({**record, "after": decided.after})
        other = _normalize_decision({**sealed, "after": self.manifest.decider})
        return tuple(sorted(name for name in one if one[name] != other.get(name)))


def _normalize_decision(decision: JsonObject) -> Any:
    # Members are judged one after the other; their order says nothing.
    recorded = sorted(decision["recorded"], key=canonical_bytes)
    return parse_json(canonical_bytes({**decision, "recorded": recorded}))


def read_kept_manifests(log: SlotLog, first: int = 1) -> Iterator[Manifest]:
    """Yield the sealed epochs and merges of the current lineage, oldest first.

    Retired ones are left out.

    Args:
        log: the log.
        first: the slot to begin with.
    """
    head = log.head()
    for filled in log.epochs_between(head.timeline, max(1, first), head.slot):
        if isinstance(filled.record, Manifest):
            yield filled.record


def read_recorded_epochs(
    log: SlotLog, given: PipelineSpec, first: int = 1
) -> Iterator[RecordedEpoch]:
    """Yield the epochs from a slot on that are kept together with the one before, oldest first.

    Merges are not yielded.

    Args:
        log: the log.
        given: the present spec; an epoch of another one is read with its own.
        first: the slot to begin with.

    Raises:
        ConfigurationError: as `find_own_spec`.
    """
    parent: Manifest | None = None
    continues, specs = False, {given.digest(): given}
    for manifest in read_kept_manifests(log, first - 1):
        begins = manifest.slot == 1 and first <= 1
        if not begins and (parent is None or parent.slot != manifest.slot - 1):
            continues = False
        elif not manifest.is_merge:
            digest = manifest.spec_digest
            if digest not in specs:
                specs[digest] = find_own_spec(given, manifest, log.store)
            yield RecordedEpoch(specs[digest], manifest, parent, continues)
            continues = True
        parent = manifest


def find_own_spec(given: PipelineSpec, epoch: Manifest, store: Store) -> PipelineSpec:
    """Return the spec that sealed an epoch.

    Raises:
        ConfigurationError: the given one is another, and that one was not kept, or this version
            cannot read it.
    """
    if given.digest() == epoch.spec_digest:
        return given
    own = read_spec(store, given.name, epoch.spec_digest)
    if own is None:
        raise NO_OWN_SPEC(pipeline=given.name, checkpoint=epoch.id, digest=epoch.spec_digest[:12])
    return own
