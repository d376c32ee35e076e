"""The cast of a schedule.

Drivers, restorers, retention, compaction and the feeder, each around the real code.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any

from tests.engine.harness import SECOND, barrier, row
from tests.oracle.memory_source import MemorySource
from tests.simulation.basics import NEVER, PIPELINE, Violation
from tests.simulation.catalog_model import Catalog, external_files
from tests.simulation.object_feed import LandedFeed, ObjectFeed, make_feed
from tests.simulation.private_catalog import PrivateCatalog
from tests.simulation.protocol_trace import TraceJudge
from tests.simulation.servers import Brokers, Database, server_of
from tests.simulation.shapes import MEMBERS, PLAIN, PUNCTUATION, TOPIC, spec_for
from tests.simulation.shell import drive, options_of
from tests.simulation.storage import JudgeStore, SimStore
from tests.simulation.topic_feed import TopicFeed
from tests.simulation.world import Process, SimClock, World

from tidegate.checkpoints.bucket_layout import CheckpointId
from tidegate.checkpoints.driver_requests import RequestKind, submit_request
from tidegate.checkpoints.lease import Lease, LeaseRenewer, LeaseWait, evict_lease_holder
from tidegate.checkpoints.manifest import ForkRecord, Manifest
from tidegate.checkpoints.pins import pin_checkpoint
from tidegate.checkpoints.restore import commit_restore, plan_restore
from tidegate.checkpoints.retention import Retention, RetentionPolicy
from tidegate.checkpoints.slot_log import LogHead, Sealed, SlotLog, SlotTaken
from tidegate.checkpoints.splice_requests import list_splice_requests
from tidegate.errors import ConfigurationError, PoisonError, TransientError
from tidegate.jobs.sinks.published_tables import find_published_slot, have_followers_rewound
from tidegate.jobs.sinks.table_maintenance import compact_tables, delete_orphan_files
from tidegate.jobs.spec.pipeline import CHECKPOINTS
from tidegate.jobs.splice.merge import MergeDecision, merge_request

PATIENCE = 8  # troubles in a row before a driver's process gives up
_MADE_AGAIN = ("/index/", "/status.json", "/versions.json")
_REFUSED = ("/slots/", "/current.json", "/roots.json", "/identity.json", "/sinks/")
_ROUNDS = 6  # in which someone looks for splice requests
_REFUSALS = (
    "splice.not_open",
    "splice.incomplete",
    "splice.effect_changed",
    "splice.attached_twice",
)


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


def _land(process: Process, feed: LandedFeed) -> None:
    feed.land()
    process.exited, process.alive = "done", False


class Stage:
    """One schedule's parts: the world, its catalog, its sources, and who acts."""

    def __init__(
        self, world: World, sink: str = "", shape: str = PLAIN, *, private: bool = False
    ) -> None:
        self.world = world
        world.stage = self
        told = "a private" if private else "a shared"
        world.note(f"the spec: {shape}, {sink or 'no'} sink, {told} catalog")
        self.shape, self.spec = shape, spec_for(shape, sink)
        self.server = server_of(self.spec, world)
        self.catalog = Catalog(world)
        self.private = private  # the tables' catalog is the pipeline's own, in its bucket
        world.judge = TraceJudge(self.spec.sinks)
        self.sources = {
            name: make_feed(name, source, world) for name, source in self.spec.sources.items()
        }
        self.fed: dict[str, int] = dict.fromkeys(self.sources, 0)
        self.airflow: Any = None  # if someone supervises the stream
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
            if self.shape in (PUNCTUATION, TOPIC) and name == "a":
                promised = int((5 * step + rng.randrange(-2, 4)) * SECOND)
                rows.append({"t": promised, "v": None, "kind": "cti", "n": None})
            source.append(*rows, partition=self._partition(source))
            self.fed[name] += len(rows)

    def _partition(self, source: ObjectFeed | TopicFeed | MemorySource) -> str:
        """Where rows arrive: members come, and some end before the others."""
        if self.shape != MEMBERS or not isinstance(source, MemorySource):
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

    def lander(self, name: str) -> None:
        """A landing process that is started again whenever it ends in trouble."""
        for feed in self.sources.values():
            if isinstance(feed, LandedFeed):
                supervisor = self.world.process(f"{name}.sup")
                keep = partial(self._keep_landing, name, feed)
                self.world.spawn(supervisor.name, supervisor, keep, "supervisor")

    def _keep_landing(self, name: str, feed: LandedFeed) -> None:
        me = self.world.current()
        assert me is not None
        while True:
            process = self.world.process(name, 0)
            self.world.spawn(name, process, partial(_land, process, feed), "land")
            process.watchers.append(me)
            self.world.pause(NEVER)
            if process.exited == "done":
                break
            self.world.pause(self.world.now + 1.0)
        me.process.alive = False

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

    def open_catalog(self, store: SimStore) -> Any:
        """The catalog of the tables, as a process opens it."""
        return PrivateCatalog(store, self.catalog) if self.private else self.catalog

    def neighbour(self, rounds: int) -> None:
        """Another writer in a shared catalog: it sets a property of a table now and then."""
        process = self.world.process("neighbour", 3)

        def body() -> None:
            for _ in range(rounds):
                self.world.pause(self.world.now + self.world.rng.choice((0.05, 0.5, 2.0)))
                if self.catalog.tables:
                    self.catalog.touch(self.world.rng.choice(sorted(self.catalog.tables)))
            process.alive = False

        self.world.spawn("neighbour", process, body, "neighbour")

    def require_finished(self, head: LogHead) -> None:
        """A driver that says "finished" has sealed the last row, and published every epoch."""
        record = head.record
        for source in self.sources.values():
            for member in source.list_members():
                end = source.end_position(member)
                read = record.cut[str(member)]["end"] if record and str(member) in record.cut else 0
                if read != end:
                    raise Violation(f"finished, but {member} is sealed up to {read} of {end}")
        self.require_published(head, 0)

    def require_published(self, head: LogHead, limit: int) -> None:
        """At most `limit` epochs of the current timeline are missing in a sink."""
        log = SlotLog(JudgeStore(self.world.bucket), PIPELINE)
        if head.record is None or log.head().timeline != head.timeline:
            return
        for name, (timeline, upto) in self.published().items():
            behind = head.slot - upto if timeline == head.timeline else 0
            if behind > limit:
                raise Violation(f"{name} lacks {behind} epochs, and {limit} is the limit")

    def require_answers(self, applied: list[str]) -> None:
        """A driver goes on only after it has answered the requests that its epoch applied.

        The next turn answers those that a failure left open. Without a failure it has nothing left
        to answer.

        Raises:
            Violation: a request has no answer.
        """
        bucket = self.world.bucket
        for name in applied:
            # A driver deletes an answered request after an hour, before its answer.
            is_open = bucket.layout.request_key(name) in bucket.objects
            if is_open and bucket.layout.ack_key(name) not in bucket.objects:
                raise Violation(
                    f"a driver applied and sealed {name}, and goes on without an answer"
                )

    def published(self) -> dict[str, tuple[int, int]]:
        """Sink -> timeline and slot up to which it shows the log."""
        metadata = self.catalog.tables.get(CHECKPOINTS)
        mark = metadata.main.mark if metadata and metadata.main else None
        found = {"the tables": (mark.timeline, mark.upto) if mark else (0, 0)}
        if isinstance(self.server, Database):
            found["the database"] = self.server.ledger[1:] if self.server.ledger else (0, 0)
        if isinstance(self.server, Brokers):
            found["the topics"] = self.server.ledger or (0, 0)
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
        """A disk of the store that loses an object, a part of it, or a bit."""
        process = self.world.process(name, 3)

        def body() -> None:
            world, rng = self.world, self.world.rng
            kind, keys = self._choose_damaged()
            if keys:
                key = rng.choice(keys)
                world.note(f"{key} is damaged")
                if kind == "file":
                    world.lost.add(key)
                elif kind == "refused":
                    world.garbled.add(key)
                left = rng.choice((None, 0.5, 1) if kind == "file" else (0.5, 1))
                world.bucket.damage(key, left)
            process.alive = False

        self.world.spawn(name, process, body, "damager", delay)

    def _choose_damaged(self) -> tuple[str, list[str]]:
        """Files of the newest epoch, documents that are made again, or others that are refused."""
        bucket, kind = (
            self.world.bucket,
            self.world.rng.choice(("file", "file", "made again", "refused")),
        )
        if kind == "file":
            newest = next(reversed(bucket.needs), "")
            attempt = bucket.records[newest]["attempt"] if newest else ""
            return kind, sorted(key for key in bucket.needs.get(newest, ()) if attempt in key)
        parts = _MADE_AGAIN if kind == "made again" else _REFUSED
        return kind, [key for key in bucket.keys if any(part in key for part in parts)]

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
        """Someone who asks drivers for what the spec allows, and pins the newest checkpoint by hand."""
        process = self.world.process(name, 2)
        self.world.spawn(name, process, partial(self._ask, name, process), "person", delay)
        return process

    def _ask(self, name: str, process: Process) -> None:
        store, clock = SimStore(self.world), SimClock(self.world, process.host)
        for act in self._choose_acts(name):
            with suppress(TransientError):
                act(store, clock)
            clock.sleep(self.world.rng.choice((0.1, 2.0)))
        process.exited, process.alive = "done", False

    def _choose_acts(self, name: str) -> list[Callable[[SimStore, SimClock], None]]:
        """A savepoint and a pin; then punctuation, or attachments that come and go."""
        rng, ask = self.world.rng, partial(self._ask_driver, name)
        acts: list[Callable[[SimStore, SimClock], None]] = [
            partial(ask, RequestKind.SAVEPOINT, {"name": f"{name}s"}),
            partial(self._pin_newest, name),
        ]
        if self.shape == PUNCTUATION:
            acts.append(
                partial(ask, RequestKind.CTI, {"name": "a", "time": rng.randrange(15) * SECOND})
            )
        asked = [
            n for n, a in self.spec.stream_graph.attachments.items() if a.attach == "on_request"
        ]
        for _ in range(rng.randrange(1, 4) if asked else 0):
            kind = rng.choice((RequestKind.ATTACH, RequestKind.ATTACH, RequestKind.DETACH))
            acts.insert(0, partial(ask, kind, {"name": rng.choice(asked)}))
        return acts

    def _ask_driver(
        self,
        who: str,
        kind: RequestKind,
        fields: dict[str, Any],
        store: SimStore,
        clock: SimClock,
    ) -> None:
        named = f"{who}-{kind.value}-{fields['name']}"
        submit_request(store, PIPELINE, kind, who=who, request_id=named, clock=clock, **fields)

    def merger(self, name: str, *, host: int = 2, delay: float = 0.0) -> Process:
        """Someone who merges the splice requests that wait."""
        process = self.world.process(name, host)
        self.world.spawn(name, process, partial(self._merge, name, process), "merge", delay)
        return process

    def _merge(self, name: str, process: Process) -> None:
        store, clock = SimStore(self.world), SimClock(self.world, process.host)
        log = WatchedLog(store)
        for _ in range(_ROUNDS):
            with suppress(TransientError):
                for request in list_splice_requests(store, PIPELINE):
                    self._merge_one(log, request.id, name)
            clock.sleep(self.world.rng.choice((1.0, 4.0)))
        process.exited, process.alive = "done", False

    def _merge_one(self, log: SlotLog, request: str, who: str) -> None:
        try:
            done = merge_request(self.spec, log, request, MergeDecision(who))
        except ConfigurationError as error:
            self.world.note(f"{request} is not merged: {error.message}")
            if error.code not in _REFUSALS:
                raise
        else:
            self.world.note(f"{request} is merged: {done.checkpoint}")

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
