"""What a pipeline's streams add to its driver: who dispatches, and who writes the documents of splice requests."""

from __future__ import annotations

from pathlib import Path

from tidegate.checkpoints.log import SlotLog
from tidegate.checkpoints.manifest import Manifest
from tidegate.checkpoints.store import Store
from tidegate.jobs.engine.interfaces import RowDispatcher, Mover, Sink
from tidegate.jobs.sinks.make import make_sinks
from tidegate.jobs.spec.pipeline import PipelineSpec

__all__ = ["make_dispatcher", "make_followers"]


def make_dispatcher(spec: PipelineSpec, store: Store, log: SlotLog, mover: Mover, after: Manifest | None = None) -> RowDispatcher | None:
    """Who sends rows to the spec's streams, after an epoch (default: the newest); None when it has none.

    Raises:
        ConfigurationError: a reducer's function or a pipe's predicate is not there or cannot be read.
    """
    if not spec.streams:
        return None
    from tidegate.jobs.streams.batches import FoldingMover, fold_batch
    from tidegate.jobs.streams.dispatcher import StreamDispatcher
    from tidegate.jobs.streams.history import LogHistory

    run = mover.fold_runner() if isinstance(mover, FoldingMover) else fold_batch
    return StreamDispatcher(spec, store, LogHistory(log, next(iter(spec.sources.values())).event_time, after), run)


def make_followers(spec: PipelineSpec, store: Store, uid: str, work: Path) -> list[Sink]:
    """Everything that follows the log: the sinks, and the documents of splice requests."""
    sinks = make_sinks(spec, store, uid, work)
    if any(one.merge == "splice" for one in spec.stream_graph.attachments.values()):
        from tidegate.jobs.streams.requests import SpliceRequestSink

        sinks.append(SpliceRequestSink())
    return sinks
