"""The scripts of killers: who acts, who falls asleep at which request until what has happened."""

from __future__ import annotations

from collections.abc import Callable

from tests.engine.harness import row
from tests.simulation.actors import Stage
from tests.simulation.basics import PIPELINE, Violation
from tests.simulation.storage import JudgeStore
from tests.simulation.world import Process, Rule, SimClock

from tidegate.checkpoints.driver_requests import RequestKind, submit_request
from tidegate.checkpoints.pins import RootsFile, pin_checkpoint
from tidegate.checkpoints.slot_log import SlotLog

SLOT = ("fill", "/slots/")
# A driver that starts reads its desired state for the fourth time right before its engine reads the
# head, and after its sinks have begun.
_READ_BEFORE_ENGINE = 4


def _until(stage: Stage, what: Callable[[], bool], why: str) -> None:
    stage.world.run(20_000, until=what)
    if not what():
        raise RuntimeError(f"the script never came to this: {why}")


def _sealed(stage: Stage, count: int, by: str = "") -> Callable[[], bool]:
    return lambda: sum(by in mark[2] for mark in stage.world.slot_marks) >= count


def _ended(process: Process) -> Callable[[], bool]:
    return lambda: not process.alive


def _asleep(stage: Stage, process: Process) -> Callable[[], bool]:
    return lambda: process in stage.world.waits


def _sleeper(
    stage: Stage, until: Callable[[], bool], verb: str, part: str, nth: int = 1
) -> Process:
    """A driver that falls asleep at its n-th request of a kind."""
    stage.world.rules.append(Rule("d0", verb, part, until, nth))
    process = stage.driver("d0", epochs=6)
    _until(stage, _asleep(stage, process), "d0 asleep")
    return process


def takeover(stage: Stage) -> None:
    """Asleep between lease check and PUT; wakes after another driver filled the slot."""
    sleeper = _sleeper(stage, _sealed(stage, 2, "d1"), *SLOT, nth=2)
    stage.driver("d1", host=1, epochs=3)
    _until(stage, _ended(sleeper), "d0 fenced")


def sleeper_and_restore(stage: Stage) -> None:
    """Asleep between lease check and PUT; wakes after a restore ended its timeline in this slot."""
    sleeper = _sleeper(stage, _sealed(stage, 1, "fork"), *SLOT, nth=3)
    stage.restorer("r0", back=1)
    _until(stage, _ended(sleeper), "d0 fenced")


def sleeper_and_gc(stage: Stage) -> None:
    """Asleep between lease check and PUT.

    Wakes after GC swept everything it may, and wins the slot.
    """
    gone: list[Process] = []
    _sleeper(stage, lambda: bool(gone) and not gone[0].alive, *SLOT, nth=3)
    gone.append(stage.collector("g0", runs=1))
    _until(stage, _sealed(stage, 3), "d0 sealed")


def retried_put(stage: Stage) -> None:
    """The client library repeats a PUT that had succeeded, and tells the second answer."""
    stage.world.rules.append(Rule("d0", *SLOT, "retried", 2))
    _until(stage, _ended(stage.driver("d0", epochs=3)), "d0 done")


def late_put(stage: Stage) -> None:
    """A PUT without an answer.

    Its driver dies; another fills the slot; minutes later the PUT lands.
    """
    stage.world.rules += [
        Rule("d0", *SLOT, "late", 2),
        Rule("d0", "get", "/slots/9999999997", "crash"),
    ]
    dead = stage.driver("d0", epochs=4)
    _until(stage, _ended(dead), "d0 dead")
    stage.driver("d1", host=1, epochs=2)
    _until(stage, _sealed(stage, 2, "d1"), "d1 sealed")
    stage.world.now += 600.0
    while stage.world.late:
        stage.world.deliver()


def two_restores(stage: Stage) -> None:
    """Two restores at once: the one that sleeps before its PUT must lose."""
    _until(stage, _ended(stage.driver("d0", epochs=3)), "d0 done")
    stage.world.rules.append(Rule("r0", *SLOT, _sealed(stage, 1, "fork")))
    slow = stage.restorer("r0", back=2)
    _until(stage, _asleep(stage, slow), "r0 asleep")
    stage.restorer("r1", back=1, host=2)
    _until(stage, _ended(slow), "both done")


def crash_after_fork(stage: Stage) -> None:
    """The restorer dies right after its fork record; the next driver rewinds the tables."""
    _until(stage, _ended(stage.driver("d0", epochs=3)), "d0 done")
    stage.world.rules.append(Rule("r0", *SLOT, "crash after"))
    _until(stage, _ended(stage.restorer("r0", back=2)), "r0 dead")


def two_publishers(stage: Stage) -> None:
    """A publisher asleep before its commit; another one publishes the same epoch."""
    sleeper = _sleeper(
        stage, lambda: _published(stage, "events") >= 3, "catalog.commit", "events", nth=2
    )
    stage.driver("d1", host=1, epochs=3)
    _until(stage, _ended(sleeper), "d0 done")


def begun_by_another(stage: Stage) -> None:
    """A publisher asleep between making a table and loading it.

    A restore, and the next driver begins the table.
    """
    sleeper = _sleeper(
        stage, lambda: stage.catalog.highest.get("events", 0) >= 1, "catalog.load", "events"
    )
    _until(stage, _ended(stage.restorer("r0", back=9)), "r0 done")
    stage.driver("d1", host=1, epochs=2)
    _until(stage, _ended(sleeper), "d0 fenced")


def straddling_publish(stage: Stage) -> None:
    """A publisher asleep before its commit.

    Others publish more, restore, and rewind to the very snapshot it judged.
    """
    sleeper = _sleeper(
        stage,
        lambda: stage.catalog.highest.get("events", 0) >= 1,
        "catalog.commit",
        "events",
        nth=2,
    )
    judged = stage.catalog.tables["events"].main
    other = stage.driver("d1", host=1, epochs=3)
    _until(stage, _ended(other), "d1 done")
    head = max(mark[1] for mark in stage.world.slot_marks)
    upto = judged.mark.upto if judged else 0
    _until(stage, _ended(stage.restorer("r0", back=head - upto, host=2)), "r0 done")
    stage.world.rules.append(Rule("d2", "catalog.commit", "w", _ended(sleeper)))
    stage.driver("d2", host=2, epochs=1)
    _until(stage, _ended(sleeper), "d0 done")


def claim_and_gc(stage: Stage) -> None:
    """A restore asleep before its PUT; GC must leave its target alone."""
    _until(stage, _ended(stage.driver("d0", epochs=4)), "d0 done")
    gone: list[Process] = []
    stage.world.rules.append(Rule("r0", *SLOT, lambda: bool(gone) and not gone[0].alive))
    slow = stage.restorer("r0", back=2)
    _until(stage, _asleep(stage, slow), "r0 asleep")
    gone.append(stage.collector("g0", runs=1))
    _until(stage, _ended(slow), "r0 done")


def pin_and_gc(stage: Stage) -> None:
    """A pinned checkpoint stays whatever the policy says."""
    _until(stage, _sealed(stage, 1, _driver(stage, "d0", 1)), "d0 sealed")
    _until(stage, _ended(stage.collector("g0", runs=1, pin=True)), "g0 done")
    _until(stage, _ended(stage.driver("d1", epochs=3, host=1)), "d1 done")
    _until(stage, _ended(stage.collector("g1", runs=1)), "g1 done")


def table_only(stage: Stage) -> None:
    """A retired epoch's rows live on in the tables, which alone name their files."""
    _until(stage, _ended(stage.driver("d0", epochs=4)), "d0 done")
    _until(stage, _ended(stage.collector("g0", runs=1)), "g0 done")


def follower_file_and_gc(stage: Stage) -> None:
    """A publisher asleep between writing its own file of `checkpoints` and the commit that names it
    (found by seed 1001).
    """
    gone: list[Process] = []
    sleeper = _sleeper(
        stage, lambda: bool(gone) and not gone[0].alive, "catalog.commit", "checkpoints", nth=2
    )
    gone.append(stage.collector("g0", runs=1))
    _until(stage, _ended(sleeper), "d0 done")


def abandoned_publish_and_gc(stage: Stage) -> None:
    """A publisher asleep before its commit of a slot.

    A restore abandons it, GC retires it (found by seed 2231).
    """
    gone: list[Process] = []
    sleeper = _sleeper(
        stage, lambda: bool(gone) and not gone[0].alive, "catalog.commit", "events", nth=2
    )
    _until(stage, _ended(stage.restorer("r0", back=9)), "r0 done")
    gone.append(stage.collector("g0", runs=1))
    _until(stage, _ended(sleeper), "d0 fenced")


def lost_renewal(stage: Stage) -> None:
    """A renewal arrived, its answer did not: the holder takes it up and drives on."""
    stage.world.rules.append(Rule("d0", "swap", "lease", "lost answer"))
    process = stage.driver("d0", epochs=9)
    _until(stage, _ended(process), "d0 done")
    if stage.world.rules[0].fired and not process.exited.startswith("done"):
        raise Violation(f"a lost answer ended the driver: {process.exited}")


def wedged(stage: Stage) -> None:
    """A driver hangs in a step while its heartbeat lives: the lease must run out."""
    stage.world.rules.append(Rule("d0", *SLOT, _sealed(stage, 1, "d1"), 2, wedge=True))
    stage.driver("d0", epochs=4)
    _until(stage, lambda: stage.world.rules[0].fired, "d0 wedged")
    stage.driver("d1", host=1, epochs=2)
    stage.world.run(20_000, until=_sealed(stage, 1, "d1"))
    if not _sealed(stage, 1, "d1")():
        raise Violation("no one could take over from a wedged driver")


def bad_newest(stage: Stage) -> None:
    """The newest checkpoint has lost a state segment.

    It is passed over by a restore, and nothing else is.
    """
    _until(stage, _ended(stage.driver("d0", epochs=3)), "d0 done")
    bucket = stage.world.bucket
    slot = min(key for key in bucket.needs if "timelines/0/slots" in key)
    lost = next(
        key
        for key in bucket.needs[slot]
        if "/state/" in key and bucket.records[slot]["attempt"] in key
    )
    stage.world.damaged.add(slot)
    bucket.remove(lost)


def stale_stop(stage: Stage) -> None:
    """A stop request meant for a driver that died before it read it.

    Its successor must not obey.
    """
    stage.world.rules.append(Rule("d0", *SLOT, "crash", 2))
    _until(stage, _ended(stage.driver("d0", epochs=3)), "d0 dead")
    submit_request(
        JudgeStore(stage.world.bucket),
        PIPELINE,
        RequestKind.STOP,
        who="ann",
        token=1,
        clock=SimClock(stage.world, 0),
    )
    successor = stage.driver("d1", host=1, epochs=3)
    _until(stage, _ended(successor), "d1 done")
    if not _sealed(stage, 3, "d1")():
        raise Violation("the successor obeyed a request that was not meant for it")


def hole_on_the_way(stage: Stage) -> None:
    """Retention looks at an abandoned epoch that leads to a pinned one; then that is restored."""
    _until(stage, _ended(stage.driver("d0", epochs=4)), "d0 done")
    log = SlotLog(JudgeStore(stage.world.bucket), PIPELINE)
    pinned = log.head().checkpoint
    assert pinned is not None
    pin_checkpoint(log, "kept", pinned, who="ann")
    _until(stage, _ended(stage.restorer("r0", back=2)), "r0 done")
    _until(stage, _ended(stage.driver("d1", host=1, epochs=3)), "d1 done")
    _until(stage, _ended(stage.collector("g0", runs=1)), "g0 done")
    _until(stage, _ended(stage.restore_to("r1", pinned)), "r1 done")


def lost_last_slot(stage: Stage) -> None:
    """A superseded driver wins the slot in which its successor would have sealed the last rows."""
    _until(stage, _ended(stage.driver("d", epochs=8)), "everything so far is sealed")
    sealed = len(stage.world.slot_marks)
    for source in stage.sources.values():
        source.append(row(40.0))
    successor: list[Process] = []
    stage.world.rules += [
        Rule("d0", *SLOT, lambda: bool(successor) and successor[0] in stage.world.waits),
        Rule("d1", *SLOT, _sealed(stage, sealed + 1)),
    ]
    _until(stage, _asleep(stage, stage.driver("d0")), "d0 asleep")
    for source in stage.sources.values():
        source.append(row(41.0))
    stage.end_sources()
    successor.append(stage.driver("d1", host=1))
    _until(stage, _ended(successor[0]), "d1 done")
    if stage.world.slot_marks[sealed][2] != "d0":
        raise RuntimeError("d0 has not won the slot")


def head_moves_behind_sinks(stage: Stage) -> None:
    """A superseded driver seals the last epoch after its successor's sinks have begun.

    It dies before it publishes, and only then does the successor's engine read the head.
    """
    _until(stage, _ended(stage.driver("d", epochs=8)), "everything so far is sealed")
    sealed = len(stage.world.slot_marks)
    for source in stage.sources.values():
        source.append(row(40.0))
    stage.end_sources()
    begun: list[float] = []
    waits = Rule(
        "d1", "get", "desired.json", _sealed(stage, sealed + 1), _READ_BEFORE_ENGINE, wedge=True
    )

    def sinks_have_begun() -> bool:
        if waits.fired and not begun:
            begun.append(stage.world.now)
        return bool(begun) and stage.world.now > begun[0] + 2.0

    stage.world.rules += [Rule("d0", *SLOT, sinks_have_begun), waits]
    _until(stage, _asleep(stage, stage.driver("d0")), "d0 asleep")
    stage.world.rules.append(Rule("d0", "catalog.commit", "", "crash"))
    _until(stage, _ended(stage.driver("d1", host=1)), "d1 done")
    if stage.world.slot_marks[sealed][2] != "d0":
        raise RuntimeError("d0 has not won the slot")


def lost_pin(stage: Stage) -> None:
    """A driver dies right after it sealed the epoch of a savepoint, before the pin.

    Its successor must pin that very epoch.
    """
    store = JudgeStore(stage.world.bucket)
    asked = submit_request(
        store,
        PIPELINE,
        RequestKind.SAVEPOINT,
        who="ann",
        name="kept",
        clock=SimClock(stage.world, 0),
    )
    stage.world.rules.append(Rule("d0", *SLOT, "crash after"))
    _until(stage, _ended(stage.driver("d0", epochs=3)), "d0 dead")
    _until(stage, _ended(stage.driver("d1", host=1, epochs=2)), "d1 done")
    pin = RootsFile(store, PIPELINE).read().pins.get("kept")
    applied = [
        f"t0-{r['slot']:06d}-{r['attempt']}"
        for r in stage.world.bucket.records.values()
        if asked.id in r["requests"]
    ]
    if pin is None or [pin.checkpoint] != applied:
        raise Violation(f"a savepoint applied by {applied} is pinned as {pin}")


def two_database_publishers(stage: Stage) -> None:
    """A publisher asleep between reading the ledger and applying the next slot.

    Another one applies it, and more.
    """
    world, since = stage.world, list[float]()

    def ahead() -> bool:
        return stage.server.ledger is not None and stage.server.ledger[2] >= 3

    def applied() -> bool:
        """The others of its process sleep a little longer.

        They would find the lease lost, and end it.
        """
        if ahead() and not since:
            since.append(world.now)
        return bool(since) and world.now > since[0] + 20.0

    world.rules += [
        Rule("d0", "swap", "lease", applied, wedge=True),
        Rule("d0", *SLOT, applied, 2, wedge=True),
        Rule("d0", "serve", "commit", ahead, 5, wedge=True),
    ]
    sleeper = stage.driver("d0", epochs=6)
    _until(stage, lambda: world.rules[-1].fired, "d0's publisher asleep")
    stage.driver("d1", host=1, epochs=3)
    _until(stage, _ended(sleeper), "d0 fenced")


def late_delivery(stage: Stage) -> None:
    """A publisher asleep before it delivers a slot.

    A restore abandons the slot, and is followed; then the delivery arrives.
    """
    gone: list[Process] = []
    sleeper = _sleeper(stage, lambda: bool(gone) and not gone[0].alive, "serve", "t0-000002")
    _until(stage, _ended(stage.restorer("r0", back=_sealed_slots(stage) - 1)), "r0 done")
    gone.append(stage.driver("d1", host=1, epochs=1))
    _until(stage, _ended(sleeper), "d0 fenced")


def _sealed_slots(stage: Stage) -> int:
    return max(int(mark[1]) for mark in stage.world.slot_marks)


def wiped_bucket(stage: Stage) -> None:
    """The bucket is wiped while the catalog survives.

    A new history must not be published into the old tables.
    """
    _until(stage, _ended(stage.driver("d0", epochs=2)), "d0 done")
    bucket, before = (
        stage.world.bucket,
        {table: metadata.main for table, metadata in stage.catalog.tables.items()},
    )
    bucket.wipe()
    stage.world.damaged.add("everything")
    # Its publisher begins when the new log is longer than the tables: then only the uid tells the
    # histories apart.
    stage.world.rules.append(
        Rule("d1", "catalog.load", "checkpoints", _sealed(stage, 4, "d1"), wedge=True)
    )
    _until(stage, _ended(stage.driver("d1", epochs=4)), "d1 ended")
    if {table: metadata.main for table, metadata in stage.catalog.tables.items()} != before:
        raise Violation("two histories were mixed in one table")
    stage.catalog.tables.clear()  # what a person would do then
    stage.catalog.highest.clear()


def straddling_merge(stage: Stage) -> None:
    """A compaction asleep before its commit.

    A restore takes some of its parts, and the tables follow it.
    """
    _until(stage, _ended(stage.driver("d0", epochs=4)), "d0 done")
    stage.world.rules.append(
        Rule(
            "c0", "catalog.commit", "checkpoints", lambda: stage.catalog.highest["checkpoints"] >= 1
        )
    )
    sleeper = stage.compactor("c0", runs=1)
    _until(stage, _asleep(stage, sleeper), "c0 asleep")
    _until(stage, _ended(stage.restorer("r0", back=2)), "r0 done")
    stage.driver("d1", host=1, epochs=1)
    _until(stage, _ended(sleeper), "c0 done")


def late_merge(stage: Stage) -> None:
    """A compaction's commit without an answer.

    Its run deletes what no snapshot names; then the commit lands.
    """
    _until(stage, _ended(stage.driver("d0", epochs=4)), "d0 done")
    stage.world.rules.append(Rule("c0", "catalog.commit", "checkpoints", "late"))
    _until(stage, _ended(stage.compactor("c0", runs=1)), "c0 done")
    while stage.world.late:
        stage.world.deliver()


def _driver(stage: Stage, name: str, epochs: int) -> str:
    stage.driver(name, epochs=epochs)
    return name


def _published(stage: Stage, table: str) -> int:
    metadata = stage.catalog.tables.get(table)
    return metadata.main.mark.upto if metadata and metadata.main else 0
