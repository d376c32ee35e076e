"""A pipeline with streams on plain parts: engine, oracle mover, memory store, dispatcher."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from tests.engine.harness import SECOND, Bench, spec_of
from tidegate.checkpoints.manifest import Manifest
from tidegate.checkpoints.slot_log import SlotLog
from tidegate.checkpoints.store import Store
from tidegate.jobs.engine.epoch_engine import Engine, EpochReport, EpochRequests
from tidegate.jobs.engine.interfaces import Faults
from tidegate.jobs.sinks.published_tables import read_positions
from tidegate.jobs.streams.dispatcher import DispatchRunner, StreamDispatcher, make_local_runner
from tidegate.jobs.streams.row_history import LogHistory
from tidegate.jobs.streams.stream_state import DispatchState

_SOURCE: dict[str, Any] = {
    "path": "inbox/x/",
    "schema": {"t": "timestamp", "v": "long"},
    "event_time": "t",
    "lag": "-1us",
}


def streams_spec(**fields: Any) -> Any:
    """One source `a` with columns t and v, released at once in order of time."""
    return spec_of(sources={"a": _SOURCE}, windows={}, **fields)


class World:
    """Feeds rows, runs epochs, reads streams."""

    def __init__(
        self,
        spec: Any,
        store: Store | None = None,
        make_runner: Callable[[Bench, LogHistory], DispatchRunner] | None = None,
    ) -> None:
        self.bench = Bench(spec, store)
        self._make_runner = make_runner
        self.engine = self.driver()
        self._asked = 0

    def driver(self, faults: Faults | None = None, spec: Any = None) -> Engine:
        """A new driver on what lies in the store; under another spec if given."""
        if spec is not None:
            self.bench.spec = spec
        bench = self.bench
        log = SlotLog(bench.store, bench.spec.name, clock=bench.clock)
        published = partial(read_positions, bench.spec, bench.store)
        history = LogHistory(log, "t", published=published)
        run = make_local_runner(bench.store, history)
        if self._make_runner is not None:
            run = self._make_runner(bench, history)
        dispatch = StreamDispatcher(bench.spec, run) if bench.spec.streams else None
        self.engine = bench.engine(faults=faults, dispatch=dispatch)
        return self.engine

    def feed(self, *rows: tuple[float, int]) -> None:
        """Rows (second, value) for the source."""
        self.bench.sources["a"].append(
            *({"t": int(second * SECOND), "v": value} for second, value in rows)
        )

    def epoch(
        self,
        *rows: tuple[float, int],
        now: float | None = None,
        ask: tuple[tuple[str, str], ...] = (),
    ) -> EpochReport:
        """One epoch over these rows."""
        self.feed(*rows)
        if now is not None:
            self.bench.clock.advance(now - self.bench.clock.monotonic())
        self._asked += len(ask)
        return self.engine.run_epoch(
            EpochRequests(
                ids=tuple(f"r{self._asked}-{n}" for n in range(len(ask))), attachments=ask
            )
        )

    def rows(self, table: str) -> list[dict[str, Any]]:
        """Rows of a stream in order of position."""
        return sorted(self.bench.rows(table), key=lambda r: r.get("position", 0))

    def values(self, table: str) -> list[int]:
        """Values of column v."""
        return [r["v"] for r in self.rows(table)]

    def head(self) -> Manifest:
        """The newest epoch."""
        return self.bench.epochs()[-1]

    def state(self) -> DispatchState:
        """The state of the streams."""
        return DispatchState.from_record(self.head().notes["streams"])
