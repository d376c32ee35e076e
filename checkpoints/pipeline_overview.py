"""One typed overview of a pipeline for every surface that shows or judges it.

`read_overview` needs at most five requests (lease, report, desired state, and the head of the log
with its newest epoch), and two more for each restore that the `SlotLog` has not read yet. The
command line, the Streams page, the trigger and the sweep all derive one `PipelineState` from it,
and `PipelineState.word_for` gives the word that each surface shows. The states name nothing that
only pipelines with sources or windows have.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Literal

from tidegate.errors import FailureClass
from tidegate.json_types import JsonView
from tidegate.time_units import format_instant

from .driver_reports import DriverStatus, read_status_and_age
from .driver_requests import DesiredDocument, DesiredState, read_desired_state
from .host_clock import SYSTEM_CLOCK
from .lease import LeaseObserver, LeaseView, read_lease
from .manifest import Manifest
from .row_counts import RowCounts
from .slot_log import LogHead, SlotLog
from .store import Store

# Seconds. A driver reports every 2 s, and `tidegate status` should show a loss in under 15 s.
_REPORT_IS_OLD_AFTER = 15.0
_FAR_FUTURE = 24 * 3_600_000_000  # ticks; clocks of producers may be an hour or a zone off
# Of one source. A member takes some 500 bytes of each manifest and a request in each epoch.
_MANY_MEMBERS = 200
# With one trouble; if more have it, they are not its cause.
_NAMED = 3


class PipelineState(StrEnum):
    """What a pipeline is doing."""

    NEW = "new"  # no driver ever held the lease
    LEASED = "leased"  # a driver holds the lease and has not reported yet
    STARTING = "starting"  # this and the next three: a driver holds the lease and reports it
    RUNNING = "running"
    WAITING = "waiting"
    DRAINING = "draining"
    SILENT = "silent"  # a driver holds the lease, and its newest report is old
    STALLED = "stalled"  # a driver holds the lease or runs, and makes no progress
    LOST = "lost"  # the driver died, or none runs although people want one
    FINISHED = "finished"  # this and the next two: the final report of the last driver
    FAILED = "failed"
    STOPPED = "stopped"
    RECOVERING = "recovering"  # a restore is under way
    UNKNOWN = "unknown"  # the store does not answer

    def word_for(self, surface: Surface) -> str:
        """Return the word that a surface shows for this state."""
        return _WORDS[surface].get(self, self.value)


# `cli`: tidegate status. `page`: the API of the Streams page. `event`: the trigger's event, which
# also lies in Airflow's database, and the tag of a metric.
Surface = Literal["cli", "page", "event"]

# Scripts, dashboards and live databases have these words, so they differ from the states for good.
_WORDS: Mapping[Surface, Mapping[PipelineState, str]] = {
    "cli": {PipelineState.NEW: "never ran", PipelineState.LEASED: "starting"},
    "page": {PipelineState.LEASED: "running", PipelineState.LOST: "down"},
    "event": {PipelineState.RUNNING: "live"},
}
FINAL_STATES = frozenset({PipelineState.FINISHED, PipelineState.FAILED, PipelineState.STOPPED})


@dataclass(frozen=True)
class DriverOverview:
    """The lease of a pipeline, and what its drivers report.

    Attributes:
        lease: as it lies in the bucket; None if no driver ever held it.
        last_report: the newest report, whichever driver wrote it; None if there is none that this
            version can read.
        lease_expired: the lease is absent or free, its holder is proven dead, or an observer has
            seen no renewal for longer than the TTL.
        report_is_old: the last report of the driver that took the lease last is older than 15 s.
            False without such a report. Always False for an observer, which times the lease itself
            and need not compare the clocks of two hosts.
        read_at: ticks of this host's wall clock.
        report_age: seconds since the last report was written.
    """

    lease: LeaseView | None
    last_report: DriverStatus | None = None
    lease_expired: bool = False
    report_is_old: bool = False
    read_at: int = 0
    report_age: float = 0.0

    @property
    def report(self) -> DriverStatus | None:
        """The report of the driver that took the lease last; None if it has not reported.

        Without a lease, which only a wiped store has, it is what the last driver said of its end.
        """
        report = self.last_report
        if report is None or (self.lease is not None and report.token != self.lease.token):
            return None
        return report

    @property
    def facts(self) -> JsonView:
        """What the driver that took the lease last has reported; empty if it has not reported."""
        return self.report.body if self.report else {}

    @property
    def last_facts(self) -> JsonView:
        """The body of `last_report`."""
        return self.last_report.body if self.last_report else {}

    @property
    def reported_state(self) -> PipelineState:
        """The state in `report`; LEASED without one."""
        return parse_reported_state(self.facts)

    @property
    def state(self) -> PipelineState:
        """The state by lease and report alone, whatever people want."""
        if self.lease is None:
            return PipelineState.NEW
        reported = self.reported_state
        if self.lease.holder is None:
            return reported if reported in FINAL_STATES else PipelineState.STOPPED
        if self.lease_expired:
            return PipelineState.LOST
        return PipelineState.SILENT if self.report_is_old else reported


_PERSONS_FAILURES = frozenset({FailureClass.POISON.value, FailureClass.CONFIGURATION.value})


def needs_person(error: JsonView) -> bool:
    """Whether a person has to act on a reported error before trying again makes sense."""
    return error.get("class") in _PERSONS_FAILURES


def parse_reported_state(facts: JsonView) -> PipelineState:
    """Return the state in the body of a driver's report.

    LEASED if the body has none; RUNNING if a newer driver reports one that is unknown here.
    """
    try:
        return PipelineState(facts.get("state", PipelineState.LEASED))
    except ValueError:
        return PipelineState.RUNNING


def read_driver(
    store: Store, pipeline: str, observer: LeaseObserver | None = None
) -> DriverOverview:
    """Read lease and report: two requests.

    Args:
        store: the bucket.
        pipeline: its name.
        observer: times the lease from look to look. A single look can only prove that the lease is
            free or that a holder on this host is dead.
    """
    lease = observer.observe() if observer else read_lease(store, pipeline)
    expired = observer.is_expired(lease) if observer else lease is None or lease.is_free
    report, age = read_status_and_age(store, pipeline)
    driver = DriverOverview(
        lease, report, expired, read_at=SYSTEM_CLOCK.wall_ticks(), report_age=age
    )
    is_old = bool(driver.report) and not observer and age > _REPORT_IS_OLD_AFTER
    return replace(driver, report_is_old=is_old)


@dataclass(frozen=True)
class PipelineOverview:
    """A pipeline as its bucket shows it at one moment.

    Attributes:
        driver: who drives, and what the driver reports.
        desired: what people want, a restore under way included.
        head: timeline, slot and newest epoch of the log.
    """

    driver: DriverOverview
    desired: DesiredDocument
    head: LogHead

    @property
    def state(self) -> PipelineState:
        """The one state of the pipeline.

        A restore under way comes first. A driver that holds the lease counts as running even if it
        has reported its end, because no other driver can start yet. Without a driver the state is
        FINISHED or FAILED if reported, else LOST if people want it to run, else STOPPED or NEW.
        """
        reported = self.driver.reported_state
        if self.desired.state is DesiredState.RECOVERING:
            return PipelineState.RECOVERING
        if not self.driver.lease_expired:
            return PipelineState.RUNNING if reported in FINAL_STATES else self.driver.state
        if reported in (PipelineState.FINISHED, PipelineState.FAILED):
            return reported
        if self.desired.state is DesiredState.RUN:
            return PipelineState.LOST
        started = self.driver.lease or self.desired.at
        return PipelineState.STOPPED if started else PipelineState.NEW

    @property
    def newest(self) -> Manifest | None:
        """The manifest of the newest epoch or merge; None before the first.

        The cut of a merge reads no rows.
        """
        return self.head.record

    @property
    def frontier(self) -> int | None:
        """The output's frontier after the newest epoch, in ticks; None before the first.

        TICK_MIN: none yet; TICK_MAX: the end.
        """
        return self.newest.frontier_after if self.newest else None

    @property
    def row_counts(self) -> RowCounts:
        """Rows of all sources since the beginning of the lineage."""
        return RowCounts.of_sources(self.newest.counters.per_source if self.newest else {})

    @property
    def warnings(self) -> list[str]:
        """What a person should look at although the pipeline runs, a sentence each.

        Members that have shown a time more than a day ahead of the clock, and sources with more
        than 200 partitions, both as of the newest epoch.
        """
        newest = self.newest
        if newest is None:
            return []
        ahead = {
            member: time
            for member, time in newest.newest_times.items()
            if time - newest.recorded_now > _FAR_FUTURE
        }
        members = Counter(member.partition("/")[0] for member in newest.cut)
        many = {source: count for source, count in members.items() if count > _MANY_MEMBERS}
        return [*_describe_far_future(ahead), *_describe_partitions(many)]

    @property
    def checkpoint_age(self) -> float | None:
        """Seconds since the newest epoch or merge, by the wall clocks of its writer and this host.

        None before the first.
        """
        newest = self.newest
        return (self.driver.read_at - newest.created_at) / 1_000_000 if newest else None


def read_overview(
    log: SlotLog, observer: LeaseObserver | None = None, head: LogHead | None = None
) -> PipelineOverview:
    """Read the overview of a pipeline: lease, newest report, desired state, and head.

    Args:
        log: the pipeline's log.
        observer: has timed the lease over several looks. None: one look, which shows a driver as
            gone only if its lease is free or its process on this host is dead.
        head: the head of the log if the caller has read it already.
    """
    return PipelineOverview(
        read_driver(log.store, log.pipeline, observer),
        read_desired_state(log.store, log.pipeline),
        head or log.head(),
    )


def name_worst(values: Mapping[str, float]) -> str:
    """Name those with the largest values; if more than three have one trouble, count the rest."""
    worst = sorted(values, key=lambda name: (-values[name], name))
    more = len(worst) - _NAMED
    return ", ".join(worst[:_NAMED]) + (f" and {more} more" if more > 0 else "")


def _describe_far_future(ahead: Mapping[str, int]) -> list[str]:
    if not ahead:
        return []
    time = format_instant(max(ahead.values()))
    shown, their = f"has shown a row of {time}", "its"
    if len(ahead) > 1:
        shown, their = f"have shown rows of up to {time}", "their"
    return [
        f"{name_worst(ahead)} {shown}, far ahead of the clock: {their} later rows are late; to take"
        " the row back, set max_jump and restore a checkpoint from before it"
    ]


def _describe_partitions(many: Mapping[str, int]) -> list[str]:
    if not many:
        return []
    most = f"{max(many.values()):,} partitions"
    has = f"has {most}" if len(many) == 1 else f"have up to {most}"
    return [
        f"{name_worst(many)} {has}: each is listed in every epoch and kept in every"
        " manifest; use fewer folders, or partition_by: source"
    ]
