"""The cast of a schedule.

Drivers, restorers, retention, compaction and the feeder, each around the real code.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any

from tests.engine.harness import barrier, row
from tests.oracle.memory_source import MemorySource
from tests.servers.memory_store import MemoryStore
from tests.simulation.basics import NEVER, PIPELINE, Violation
from tests.simulation.catalog_model import Catalog, external_files
from tests.simulation.protocol_trace import TraceJudge
from tests.simulation.servers import Database, server_of
from tests.simulation.shapes import MEMBERS, PLAIN, spec_for
from tests.simulation.shell import drive, options_of
from tests.simulation.storage import SimStore
from tests.simulation.world import Process, SimClock, World

from tidegate.checkpoints.bucket_layout import CheckpointId
from tidegate.checkpoints.driver_requests import RequestKind, submit_request
from tidegate.checkpoints.lease import Lease, LeaseRenewer, LeaseWait, evict_lease_holder
from tidegate.checkpoints.manifest import ForkRecord, Manifest
from tidegate.checkpoints.pins import pin_checkpoint
from tidegate.checkpoints.restore import commit_restore, plan_restore
from tidegate.checkpoints.retention import Retention, RetentionPolicy
from tidegate.checkpoints.slot_log import LogHead, Sealed, SlotLog, SlotTaken
from tidegate.errors import ConfigurationError, PoisonError, TransientError
from tidegate.jobs.sinks.published_tables import find_published_slot, have_followers_rewound
from tidegate.jobs.sinks.table_maintenance import compact_tables, delete_orphan_files
from tidegate.jobs.spec.pipeline import CHECKPOINTS

PATIENCE = 8  # troubles in a row before a driver's process gives up


class WatchedLog(SlotLog):
    """The real log; whatever it says about a fate is compared with what the bucket holds."""

    def __init__(self, store: SimStore) -> None:
        actor = store.world.current()
        clock = SimClock(store.world, actor.process.host if actor else 0)
        super().__init__(store, PIPELINE, clock=clock, jitter=store.world.rng.random)
        self.world = store.world

    def seal(self, record: Manifest | ForkRecord) -> Sealed | SlotTaken:
        """Seal, and check the answer."""
        outcome = super().seal(record)
        key = self.layout.slot_key(record.timeline, record.slot)
        mine = self.world.bucket.bytes.get(key) == record.to_bytes()
        if mine is not isinstance(outcome, Sealed):
            raise Violation(
                f"slot {record.slot} of {record.timeline}: told {type(outcome).__name__}, the slot"
                " says otherwise"
            )
        return outcome


class Stage:
    """One schedule's parts: the world, its catalog, its sources, and who acts."""

    def __init__(self, world: World, sink: str = "", shape: str = PLAIN) -> None:
        self.world = world
        world.stage = self
        world.note(f"the spec: {shape}, {sink or 'no'} sink")
        self.shape, self.spec = shape, spec_for(shape, sink)
        self.server = server_of(self.spec, world)
        self.catalog = Catalog(world)
        world.judge = TraceJudge(self.spec.sinks)
        self.sources = {name: MemorySource(name) for name in self.spec.sources}
        self.fed: dict[str, int] = dict.fromkeys(self.sources, 0)
        self.compacts = False
        self.rolling = False  # some drivers are of an older version
        self.ends = False  # the feeder ends the sources, while drivers are busy

    # the feed

    def feed(self, step: int) -> None:
        """A handful of rows per source, some late, a barrier now and then.

        The same for everyone.
        """
        rng = self.world.rng
        for name, source in self.sources.items():
            rows = [
                row(5 * step + rng.randrange(-6, 6) + 6, rng.randrange(5))
                for _ in range(rng.randrange(1, 5))
            ]
            if step == 1:
                rows.insert(rng.randrange(len(rows) + 1), barrier(5 * step + 6, 1))
            source.append(*rows, partition=self._partition(source))
            self.fed[name] += len(rows)

    def _partition(self, source: MemorySource) -> str:
        """Where rows arrive: members come, and some end before the others."""
        if self.shape != MEMBERS:
            return "0"
        rng = self.world.rng
        open_ones = [m.partition for m in source.list_members() if m not in source._ended]
        newest = str(len(source.list_members()))
        chosen = rng.choice([*open_ones, newest])
        if len(open_ones) > 1 and rng.random() < 0.2:
            source.end(next(one for one in open_ones if one != chosen))
        return chosen

    def end_sources(self) -> None:
        """No more rows will come."""
        for source in self.sources.values():
            for member in source.list_members():
                source.end(member.partition)

    def feeder(self, steps: int) -> None:
        """Rows arrive while everyone is busy."""

        def body() -> None:
            for step in range(steps):
                self.feed(step)
                if self.ends and step == steps - 1:
                    self.end_sources()
                self.world.pause(self.world.now + self.world.rng.choice((0.05, 0.5, 3.0)))

        self.world.spawn("feeder", self.world.process("feeder"), body, "feeder")

    # drivers

    def driver(
        self,
        name: str,
        *,
        host: int = 0,
        epochs: int = 4,
        delay: float = 0.0,
        respawn: int = 0,
        asked_by: str | None = None,
    ) -> Process:
        """A driver's process, with all its threads: see `shell`."""
        process = self.world.process(name, host)
        if self.rolling and asked_by is None:
            process.version = self.world.rng.choice("12")
        options = options_of(epochs, asked_by=asked_by)
        self.world.spawn(name, process, partial(drive, self, process, options), delay=delay)
        if respawn:
            self.world.spawn(
                f"{name}.sup",
                self.world.process(f"{name}.sup"),
                partial(self._supervise, name, process, host, epochs, respawn),
                "supervisor",
            )
        return process

    def _supervise(self, name: str, process: Process, host: int, epochs: int, left: int) -> None:
        """Starts a driver again that ended in trouble."""
        me = self.world.current()
        assert me is not None
        if process.alive:
            process.watchers.append(me)
            self.world.pause(NEVER)
        self.world.pause(self.world.now + self.world.rng.choice((0.5, 4.0)))
        if not process.exited.startswith("done"):
            self.driver(f"{name}'", host=host, epochs=epochs, respawn=left - 1)

    def require_finished(self, head: LogHead) -> None:
        """A driver that says "finished" has sealed the last row, and published every epoch."""
        record = head.record
        for source in self.sources.values():
            for member in source.list_members():
                rows = len(source._rows[member])
                read = record.cut[str(member)]["end"] if record and str(member) in record.cut else 0
                if read != rows:
                    raise Violation(f"finished, but {read} of {rows} rows of {member} are sealed")
        self.require_published(head, 0)

    def require_published(self, head: LogHead, limit: int) -> None:
        """At most `limit` epochs of the current timeline are missing in a sink."""
        log = SlotLog(MemoryStore(self.world.bucket, name="sim"), PIPELINE)
        if head.record is None or log.head().timeline != head.timeline:
            return
        for name, (timeline, upto) in self.published().items():
            behind = head.slot - upto if timeline == head.timeline else 0
            if behind > limit:
                raise Violation(f"{name} lacks {behind} epochs, and {limit} is the limit")

    def published(self) -> dict[str, tuple[int, int]]:
        """Sink -> timeline and slot up to which it shows the log."""
        metadata = self.catalog.tables.get(CHECKPOINTS)
        mark = metadata.main.mark if metadata and metadata.main else None
        found = {"the tables": (mark.timeline, mark.upto) if mark else (0, 0)}
        if isinstance(self.server, Database):
            found["the database"] = self.server.ledger[1:] if self.server.ledger else (0, 0)
        return found

    def _acquire(
        self, store: SimStore, process: Process, clock: SimClock, uid: str | None
    ) -> Lease:
        lease: Lease = self._patiently(
            clock,
            lambda: Lease.acquire(
                store, PIPELINE, process.holder, clock=clock, uid=uid, wait=LeaseWait(standby=True)
            ),
        )
        return lease

    def _patiently(self, clock: SimClock, ask: Any) -> Any:
        for _ in range(PATIENCE):
            try:
                return ask()
            except TransientError:
                clock.sleep(1.0)
        return ask()

    # restores and retention

    def restorer(self, name: str, *, host: int = 1, back: int = 1, delay: float = 0.0) -> Process:
        """Someone who evicts the driver and goes back some checkpoints."""
        return self._spawn_restore(name, host, delay, lambda log: self._target(log, back))

    def restore_to(self, name: str, checkpoint: CheckpointId) -> Process:
        """Someone who evicts the driver and restores this checkpoint."""
        return self._spawn_restore(name, 1, 0.0, lambda log: checkpoint)

    def _spawn_restore(
        self, name: str, host: int, delay: float, choose: Callable[[SlotLog], CheckpointId | None]
    ) -> Process:
        process = self.world.process(name, host)
        act = partial(self._restore, name, process, choose)
        self.world.spawn(name, process, act, "restore", delay)
        return process

    def _restore(
        self, name: str, process: Process, choose: Callable[[SlotLog], CheckpointId | None]
    ) -> None:
        store, clock = SimStore(self.world), SimClock(self.world, process.host)
        log = WatchedLog(store)
        evict_lease_holder(store, PIPELINE)
        lease = self._acquire(store, process, clock, None)
        with LeaseRenewer(lease) as keeper:
            keeper.announce_step("restore", 300.0)
            plan = plan_restore(log, choose(log))
            for _ in range(PATIENCE):
                try:
                    commit_restore(log, lease, plan, request_id=name, who=name, why="")
                    break
                except TransientError as error:
                    if error.code == "restore.head_moved":
                        raise
                    clock.sleep(1.0)
        lease.release()
        process.exited, process.alive = "done", False

    def _target(self, log: SlotLog, back: int) -> CheckpointId | None:
        """`back` checkpoints before the head.

        The beginning if there are fewer; an abandoned one if `back` is negative.
        """
        head = log.head()
        found: CheckpointId | None = head.checkpoint
        if back < 0 and head.timeline > 0:
            newest = [
                f
                for t in range(head.timeline)
                for s in range(1, 8)
                if (f := log.read_slot(t, s)) and isinstance(f.record, Manifest)
            ]
            return newest[-1].epoch.id if newest else None
        for filled in log.iterate_ancestors(head.checkpoint):
            if back == 0:
                return filled.epoch.id
            back -= 1
            found = None
        return found

    def collector(
        self,
        name: str,
        *,
        host: int = 2,
        keep: int = 1,
        runs: int = 2,
        delay: float = 0.0,
        pin: bool = False,
    ) -> Process:
        """Retention with no mercy: no grace, hardly anything kept."""
        process = self.world.process(name, host)
        self.world.spawn(
            name, process, partial(self._collect, name, process, keep, runs, pin), "gc", delay
        )
        return process

    def _collect(self, name: str, process: Process, keep: int, runs: int, pin: bool) -> None:
        store, clock = SimStore(self.world), SimClock(self.world, process.host)
        log = WatchedLog(store)
        retention = self.retention(store, log, clock, keep)
        for number in range(runs):
            with suppress(TransientError):
                if pin:
                    self._pin_newest(f"{name}{number}", store, clock)
                retention.run()
            clock.sleep(self.world.rng.choice((0.1, 1.0, 5.0)))
        process.exited, process.alive = "done", False

    def damager(self, name: str, *, delay: float = 0.0) -> None:
        """A disk of the store that loses a state file of the newest epoch, or a part of it."""
        process = self.world.process(name, 3)

        def body() -> None:
            bucket = self.world.bucket
            newest = next(reversed(bucket.needs), "")
            attempt = bucket.records[newest]["attempt"] if newest else ""
            own = sorted(k for k in bucket.needs.get(newest, ()) if "/state/" in k and attempt in k)
            if own:
                self.world.lost.add(key := self.world.rng.choice(own))
                self.world.note(f"{key} is damaged")
                bucket.damage(key, left=self.world.rng.choice((None, 0.5)))
            process.alive = False

        self.world.spawn(name, process, body, "damager", delay)

    def compactor(self, name: str, *, host: int = 2, runs: int = 2, delay: float = 0.0) -> Process:
        """Maintenance of the tables.

        Small files are merged, and merged ones that no one can name any more deleted.
        """
        process = self.world.process(name, host)
        self.compacts = True
        self.world.spawn(name, process, partial(self._compact, process, runs), "compact", delay)
        return process

    def _compact(self, process: Process, runs: int) -> None:
        store, clock = SimStore(self.world), SimClock(self.world, process.host)
        for _ in range(runs):
            with suppress(TransientError):
                compact_tables(self.spec, store)
            with suppress(TransientError):
                delete_orphan_files(self.spec, store, grace=0.0, clock=clock)
            clock.sleep(self.world.rng.choice((0.1, 1.0, 5.0)))
        process.exited, process.alive = "done", False

    def person(self, name: str, *, delay: float = 0.0) -> Process:
        """Someone who asks for a savepoint, and pins the newest checkpoint by hand."""
        process = self.world.process(name, 2)
        self.world.spawn(name, process, partial(self._ask, name, process), "person", delay)
        return process

    def _ask(self, name: str, process: Process) -> None:
        store, clock = SimStore(self.world), SimClock(self.world, process.host)
        for act in (partial(self._ask_savepoint, name), partial(self._pin_newest, name)):
            with suppress(TransientError):
                act(store, clock)
            clock.sleep(self.world.rng.choice((0.1, 2.0)))
        process.exited, process.alive = "done", False

    def _ask_savepoint(self, name: str, store: SimStore, clock: SimClock) -> None:
        submit_request(
            store,
            PIPELINE,
            RequestKind.SAVEPOINT,
            who=name,
            name=f"{name}s",
            request_id=name,
            clock=clock,
        )

    def _pin_newest(self, name: str, store: SimStore, clock: SimClock) -> None:
        """A pin may be refused, and what it names may have been retired."""
        log = WatchedLog(store)
        head = log.head()
        try:
            if head.checkpoint is not None:
                pin_checkpoint(log, f"{name}p", head.checkpoint, who=name)
        except (ConfigurationError, PoisonError) as error:
            if error.code not in ("roots.refused", "log.no_manifest", "checkpoint.unknown"):
                raise

    def retention(self, store: SimStore, log: SlotLog, clock: SimClock, keep: int) -> Retention:
        """The real thing, on the model's catalog."""
        return Retention(
            log,
            RetentionPolicy(keep_last=keep, keep_for=-1e9, grace=0.0),
            external=lambda: external_files(self.catalog, store),
            published_upto=lambda: find_published_slot(self.spec, log),
            rewound=lambda: have_followers_rewound(self.spec, log),
            clock=clock,
            workers=1,
        )
