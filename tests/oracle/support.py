"""Random pipelines and worlds, played on the model and on decider plus oracle mover side by
side.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from hypothesis import strategies as st

from tests.conformance.bench import DeciderBench
from tests.oracle.glom import Group
from tests.oracle.model import Model, Offer, Outcome
from tidegate.jobs.engine.interfaces import Cut, MoveResult
from tidegate.jobs.eventtime.decider import list_blocked_members, select_members_ahead
from tidegate.jobs.eventtime.decision_types import Decision, Member
from tidegate.jobs.spec.pipeline import PipelineSpec, ReadLimits

SOAK = "TIDEGATE_EXAMPLES" in os.environ
EXAMPLES = int(os.environ.get("TIDEGATE_EXAMPLES", "25"))
"""Examples per property: 25 in a CI run, more in a soak run."""

COLUMNS = {
    "t": "timestamp",
    "until": "timestamp",
    "kind": "string",
    "id": "long",
    "k": "string",
    "v": "long",
}


@dataclass(frozen=True)
class Tick:
    """One epoch of a world.

    Time passed (negative: the clock was set back), arrivals (member -> rows), how much is read of each, who ends, what is aborted, how
    much of the time was worked (None: it is one gap), and the CTIs and cancels that people sent.
    """

    passed: int
    arrivals: Mapping[Member, list[dict[str, Any]]]
    limit: int | None
    ends: frozenset[Member] = frozenset()
    aborts: tuple[int, ...] = ()
    worked: int | None = None
    ctis: tuple[tuple[str, int], ...] = ()
    cancels: tuple[int, ...] = ()


@dataclass(frozen=True)
class World:
    """A pipeline and everything that happens to it."""

    spec: PipelineSpec
    members: tuple[Member, ...]
    ticks: tuple[Tick, ...]


@dataclass
class Pair:
    """The same world on the model and on decider plus mover, epoch by epoch."""

    world: World
    moved: list[tuple[Decision, MoveResult]] = field(default_factory=list)
    outcomes: list[Outcome] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.model = Model(self.world.spec)
        self.real = DeciderBench(self.world.spec)
        for member in self.world.members:
            source = self.real.sources[member.source]
            source.append(partition=member.partition)
            if member.partition != "0" and Member(member.source) not in self.world.members:
                source._rows.pop(Member(member.source), None)
        self.rows: dict[Member, list[dict[str, Any]]] = {m: [] for m in self.world.members}
        self.read: dict[Member, int] = dict.fromkeys(self.world.members, 0)
        self.ended: set[Member] = set()
        self.now = 1000

    def play(self) -> Pair:
        """All epochs; asserts equality after each."""
        for number, tick in enumerate(self.world.ticks):
            self.step(tick, number)
        return self

    def step(self, tick: Tick, number: int) -> None:
        """One epoch on both."""
        self.now += tick.passed
        for member, rows in tick.arrivals.items():
            self.rows[member] += rows
            self.real.sources[member.source].append(*rows, partition=member.partition)
        for member in tick.ends - self.ended:
            self.real.sources[member.source].end(member.partition)
        self.ended |= tick.ends
        held = (
            select_members_ahead(self.world.spec, self.real.state, self.real.buffered)
            if number
            else set()
        )
        offers = {m: self._offer(m, 0 if m in held else tick.limit) for m in self.world.members}
        waiting = list_blocked_members(self.real.state) | held
        slices = []
        for member in self.world.members:
            source = self.real.sources[member.source]
            limits = ReadLimits(rows=tick.limit)
            slices.append(
                source.plan(member, self.real.resume.get(member), limits, blocked=member in waiting)
            )
        facts: dict[str, Any] = {
            "run_start": number == 0,
            "aborts": tick.aborts,
            "cancels": tick.cancels,
            "ctis": tick.ctis,
            "worked": tick.worked,
        }
        outcome = self.model.epoch(self.now, offers, **facts)
        decision, moved, cut = self.real.run(Cut(tuple(slices)), self.now, **facts)
        self.outcomes.append(outcome)
        self.moved.append((decision, moved))
        real, model = self.seen_by_decider(decision, moved, cut), self.seen_by_model(outcome)
        different = {name: (real[name], model[name]) for name in real if real[name] != model[name]}
        assert not different, f"epoch {number}: decider and mover, model: {different}"
        for member in self.world.members:
            self.read[member] += outcome.consumed.get(str(member), 0)

    def _offer(self, member: Member, limit: int | None) -> Offer:
        start, rows = self.read[member], self.rows[member]
        end = len(rows) if limit is None else min(len(rows), start + limit)
        whole = end == len(rows)
        return Offer(
            list(enumerate(rows[start:end], start)), not whole, whole and member in self.ended
        )

    def seen_by_decider(self, decision: Decision, moved: MoveResult, cut: Cut) -> dict[str, Any]:
        """One epoch in comparable form."""
        real = self.real
        return {
            "consumed": {str(s.member): s.end - s.start for s in cut.slices},
            "clock": decision.now,
            "frontier": (decision.frontier_before, decision.frontier_after),
            "released": [
                (*place(r), r["t"], r["section"], r["_late"]) for r in real.table(moved, "events")
            ],
            "late": sorted(
                (*place(r), r["output"], r["reason"]) for r in real.table(moved, "late")
            ),
            "dead": sorted((*place(r), r["reason"]) for r in real.table(moved, "dead_letters")),
            "built": [tuple(r[c] for c in _BUILT) for r in real.table(moved, "built")],
            "dropped": moved.counters.dropped,
            "windows": {name: results(real.table(moved, name)) for name in self.world.spec.windows},
            "barriers": [
                (
                    b.id,
                    b.outcome.value,
                    sorted(b.participants),
                    sorted(b.missing),
                    sorted(b.ended),
                    sorted(b.tardy),
                    b.section,
                )
                for b in decision.barriers
            ],
            "statuses": {
                n: s
                for n, s in decision.statuses.items()
                if n in {str(m) for m in self.world.members}
            },
            "buffered": moved.counters.retained,
        }

    def _built(self, group: Group) -> tuple[Any, ...]:
        options = self.world.spec.release.glom
        assert options is not None
        row = group.row(options)
        return tuple(row[column] for column in _BUILT)

    def seen_by_model(self, outcome: Outcome) -> dict[str, Any]:
        """The same of the model."""
        return {
            "consumed": {str(m): outcome.consumed.get(str(m), 0) for m in self.world.members},
            "clock": outcome.now,
            "frontier": (outcome.before, outcome.after),
            "released": [
                (*row.member, row.seq, row.time, section, late)
                for section, row, late in outcome.released
            ],
            "late": sorted(
                (*row.member, row.seq, output, reason) for row, output, reason in outcome.late
            ),
            "dead": sorted((*member, seq, reason) for member, seq, reason in outcome.dead),
            "built": [self._built(group) for group in outcome.built],
            "dropped": dict(outcome.dropped),
            "windows": {name: results(rows) for name, rows in outcome.windows.items()},
            "barriers": [
                (
                    b.id,
                    b.outcome,
                    sorted(b.types),
                    sorted(b.missing),
                    sorted(b.ended),
                    sorted(b.tardy),
                    b.section,
                )
                for b in outcome.barriers
            ],
            "statuses": outcome.statuses,
            "buffered": outcome.buffered,
        }


_BUILT = ("stamp", "section", "first_position", "rows", "first_time", "last_time")


def place(row: Mapping[str, Any]) -> tuple[str, str, int]:
    """Where a row came from."""
    return row["_source"], row["_partition"], row["_seq"]


def results(rows: list[dict[str, Any]]) -> list[str]:
    """Window results in comparable form."""
    return sorted(
        repr(sorted((k, v) for k, v in row.items() if k not in ("_timeline", "_epoch")))
        for row in rows
    )


WINDOW_AGGREGATES = {"n": "count(*)", "s": "sum(v)", "first": "first(v)", "all": "collect(v)"}


@st.composite
def windows(draw: st.DrawFn) -> dict[str, Any]:
    """One window of any kind."""
    kind = draw(st.sampled_from(["tumbling", "sliding", "session"]))
    window: dict[str, Any] = {"kind": kind, "aggregates": WINDOW_AGGREGATES}
    if kind == "session":
        window["gap"] = draw(st.integers(1, 6))
        window["session_touch"] = draw(st.sampled_from(["merge", "separate"]))
        window["session_late"] = draw(st.sampled_from(["merged", "own", "event"]))
        window["session_close"] = draw(st.sampled_from([None, "at_end", "after_end"]))
    else:
        window["size"] = draw(st.integers(1, 8))
        period = window["size"]
        if kind == "sliding":
            period = window["slide"] = draw(st.integers(1, 8))
        window["offset"] = draw(st.integers(1 - period, period - 1))
        window["late_unit"] = draw(st.sampled_from(["window", "event", "first_window"]))
        window["zero_rows"] = draw(st.booleans())
        window["min_window_start"] = draw(st.sampled_from([None, None, 0, 3]))
    window["keys"] = draw(st.sampled_from([[], ["k"], ["_source", "k"]]))
    window["lateness"] = draw(st.sampled_from([0, 0, 3, 8, "never"]))
    window["revisions"] = draw(st.sampled_from(["accumulate", "delta"]))
    window["emit"] = draw(st.sampled_from(["close", "close", "each_epoch", "complete"]))
    if window["emit"] == "close" and not window.get("zero_rows"):
        window["fire_every"] = draw(st.sampled_from([None, None, 2, 5]))
    window["on_late"] = draw(st.sampled_from(["side_output", "drop", "adjust", "reject_to_origin"]))
    return window


@st.composite
def coalescing(draw: st.DrawFn) -> dict[str, Any]:
    """Options of one level."""
    return {
        "coalesce": draw(st.sampled_from(["min", "min", "max"])),
        "idle_timeout": draw(st.sampled_from(["never", 4, 9])),
        "all_idle": draw(st.sampled_from(["jump", "hold"])),
        "all_done": draw(st.sampled_from(["infinity", "hold"])),
        "revived": draw(st.sampled_from(["ignore", "freeze"])),
        "on_idle_punctuation": draw(st.sampled_from(["revive", "ignore"])),
        "joins": draw(st.sampled_from(["at_F", "hold"])),
        "members": draw(st.sampled_from(["declared", "declared", "discovered"])),
        "no_members": draw(st.sampled_from(["idle", "silent"])),
    }


@st.composite
def punctuations(draw: st.DrawFn) -> dict[str, Any] | None:
    """None, explicit, or generated punctuation."""
    kind = draw(st.sampled_from(["none", "none", "explicit", "events", "span", "floor"]))
    if kind == "none":
        return None
    options: dict[str, Any] = {"on_violation": draw(st.sampled_from(["error", "drop", "adjust"]))}
    options["explicit"] = kind == "explicit"
    if kind != "explicit":
        options["delay"] = draw(st.integers(-1, 3))
        options["every_events" if kind == "events" else "every_span"] = draw(st.integers(1, 4))
        options["align"] = "floor" if kind == "floor" else "after"
    options["advance_to_end"] = draw(st.booleans())
    return options


@st.composite
def sources(draw: st.DrawFn) -> dict[str, Any]:
    """One source."""
    punctuation = draw(punctuations())
    source: dict[str, Any] = {
        "path": "x",
        "schema": COLUMNS,
        "event_time": "t",
        "end_time": "until",
        "lag": draw(st.sampled_from([0, 0, 2, 5, None] if punctuation else [0, 0, 2, 5])),
        "frontier": draw(st.sampled_from(["exclusive", "inclusive"])),
        "partition_by": draw(st.sampled_from(["source", "folder"])),
        "frame": draw(st.sampled_from([None, None, 4, "never"])),
        "wall_clock": draw(
            st.sampled_from([None, None, None, {"lag": 990}, {"lag": 995, "cap": False}])
        ),
        "max_jump": draw(st.sampled_from([None, None, 20])),
        "min_event_time": draw(st.sampled_from([None, None, 0])),
        "coalesce": draw(coalescing()),
        "barriers": {"kind": "kind", "types": ["begin", "end"], "id": "id", "punctuation": "p"},
    }
    if punctuation:
        source["punctuation"] = punctuation
    return source


@st.composite
def barrier_options(draw: st.DrawFn, alignments: list[str]) -> dict[str, Any]:
    """Options of barriers."""
    return {
        "identity": draw(st.sampled_from(["ordinal", "id"])),
        "timeout": draw(st.sampled_from(["never", 6])),
        "on_timeout": draw(st.sampled_from(["incomplete", "abort"])),
        "overtake": draw(st.sampled_from(["queue", "subsume"])),
        "alignment": draw(st.sampled_from(alignments)),
    }


@st.composite
def specs(draw: st.DrawFn, /, **fixed: Any) -> PipelineSpec:
    """One pipeline with one to three sources and up to two windows.

    `fixed` parts are taken as they are.
    """
    spec: dict[str, Any] = {
        "name": "p",
        "sources": {name: draw(sources()) for name in "abc"[: draw(st.integers(1, 3))]},
    }
    for name, source in spec["sources"].items():
        others = [
            other for other in spec["sources"] if other > name
        ]  # no rule says where a circle of imports is cut
        if others and draw(st.integers(0, 3)) == 0:
            source["punctuation"] = {
                **source.get("punctuation", {}),
                "import_from": draw(st.sampled_from(others)),
            }
    spec["coalesce"] = draw(coalescing())
    spec["release"] = {
        "mode": draw(st.sampled_from(["ordered", "ordered", "pass_through", "commit"])),
        "build_window": draw(st.sampled_from(["off", "off", 0, 5])),
        "startup_grace": draw(st.sampled_from([0, 0, 3])),
        "on_late": draw(
            st.sampled_from(["side_output", "drop", "emit_flagged", "adjust", "reject_to_origin"])
        ),
        "max_ahead": draw(st.sampled_from([None, None, 3])),
        "max_buffered_rows": draw(st.sampled_from([5_000_000, 5_000_000, 2])),
    }
    if spec["release"]["mode"] != "pass_through" and draw(st.booleans()):
        stamp = draw(st.sampled_from(["earliest", "latest", "mean"]))
        spec["release"]["glom"] = {
            "dt": draw(st.integers(0, 5)),
            "max_rows": draw(st.sampled_from([2, 1000])),
            "stamp": stamp,
        }
    spec["barriers"] = draw(barrier_options(["block", "block", "pass"]))
    spec["windows"] = {name: draw(windows()) for name in ("w", "x")[: draw(st.integers(0, 2))]}
    return PipelineSpec.model_validate({**spec, **fixed})


@st.composite
def worlds(
    draw: st.DrawFn,
    /,
    spec: PipelineSpec | None = None,
    *,
    barriers: bool = True,
    silences: bool = True,
    signals: int = 12,
    shortest: int = 1,
) -> World:
    """A pipeline with rows that drift forward in time, out of order, with silences, barriers and
    punctuation.

    One of `signals` rows is a barrier row; where a source has explicit punctuation, two are that.
    """
    chosen = spec if spec is not None else draw(specs())
    members = []
    for name, source in chosen.sources.items():
        partitions = (
            ["0"] if source.partition_by == "source" else ["p0", "p1"][: draw(st.integers(1, 2))]
        )
        members += [Member(name, partition) for partition in partitions]
    numbers = dict.fromkeys(
        members, draw(st.sampled_from([0, 0, -1, -3]))
    )  # the first barrier of a source is one more
    ticks = []
    for step in range(draw(st.integers(shortest, 8))):
        arrivals = {
            m: [
                draw(_row(step, m, numbers, chosen, barriers, signals))
                for _ in range(draw(st.sampled_from([0, 1, 2, 4])))
            ]
            for m in members
            if not silences or draw(st.booleans())
        }
        ends = frozenset(m for m in members if draw(st.integers(0, 12)) == 0)
        aborts = draw(st.sampled_from([(), (), (), (1,), (2,)])) if barriers else ()
        ticks.append(
            Tick(
                draw(st.integers(-3, 5)),
                arrivals,
                draw(st.sampled_from([None, None, 1, 2])),
                ends,
                aborts,
                draw(st.sampled_from([None, None, 0, 1, 4])),
            )
        )
    return World(chosen, tuple(members), _until_the_end(ticks))


@st.composite
def dense_worlds(draw: st.DrawFn) -> World:
    """Worlds without windows, full of barriers, aborts, cancels and punctuation by people.

    Faults in how these meet need several of them at once, which `worlds` seldom has.
    """
    spec = draw(specs(windows={}, barriers=draw(barrier_options(["block", "pass", "pass"]))))
    world = draw(worlds(spec, signals=draw(st.sampled_from([5, 7])), shortest=5))
    ids = st.lists(st.integers(0, 5), max_size=1).map(tuple)
    source = st.sampled_from(sorted(world.spec.sources))
    ctis = st.lists(st.tuples(source, st.integers(-8, 40)), max_size=1).map(tuple)
    ticks = [
        replace(tick, aborts=draw(ids), cancels=draw(st.just(()) | ids), ctis=draw(ctis))
        for tick in world.ticks
    ]
    return replace(world, ticks=tuple(ticks))


def _until_the_end(ticks: list[Tick]) -> tuple[Tick, ...]:
    """Nothing arrives of a member after its end."""
    ended: set[Member] = set()
    kept = []
    for tick in ticks:
        kept.append(
            replace(tick, arrivals={m: r for m, r in tick.arrivals.items() if m not in ended})
        )
        ended |= tick.ends
    return tuple(kept)


@st.composite
def _row(
    draw: st.DrawFn,
    step: int,
    member: Member,
    numbers: dict[Member, int],
    spec: PipelineSpec,
    barriers: bool,
    signals: int,
) -> dict[str, Any]:
    time = 4 * step + draw(st.integers(-6, 8))
    kind = draw(st.integers(0, signals - 1))
    if barriers and kind == 0:
        numbers[member] += draw(st.sampled_from([1, 1, 1, 2]))
        return {"t": time, "kind": draw(st.sampled_from(["begin", "end"])), "id": numbers[member]}
    punctuation = spec.sources[member.source].punctuation
    if kind in (1, 2) and punctuation is not None and punctuation.explicit:
        return {"t": time - 3, "kind": "p"}
    if kind == 3:
        return {"t": draw(st.sampled_from([None, 5000])), "k": "x", "v": 1}
    until = time + draw(st.integers(1, 9)) if kind == 4 else None
    return {
        "t": time,
        "until": until,
        "k": draw(st.sampled_from(["x", "y", None])),
        "v": draw(st.integers(0, 9)),
    }
