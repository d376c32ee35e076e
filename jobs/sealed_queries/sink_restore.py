"""Brings the sink of a query back to the batch from which the query starts again."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Final
from urllib.parse import unquote, urlsplit

import structlog

from tidegate.checkpoints.batch_notes import SinkRewind
from tidegate.job import find_restore_callback
from tidegate.jobs.sealed_queries.checkpoint_files import SINK_LOG
from tidegate.jobs.sealed_queries.table_rollback import (
    SealedPoint,
    can_roll_back,
    roll_back_table,
)
from tidegate.jobs.sealed_queries.writer_hooks import WriterFacts

_log = structlog.get_logger("tidegate.job")

_FILE_FORMATS: Final = {"avro", "csv", "json", "orc", "parquet", "text"}
_KEEP_NOTHING: Final = {"console", "memory", "noop"}


def find_local_folder(address: str) -> Path | None:
    """Return the folder of this host that an address of Hadoop means; None for another place."""
    parts = urlsplit(address)
    if parts.scheme not in ("", "file") or parts.netloc not in ("", "localhost"):
        return None
    return Path(unquote(parts.path) if parts.scheme else address).absolute()


def find_sink_log(facts: WriterFacts) -> Path | None:
    """Return the log folder of a local file sink, which need not exist; None for another sink."""
    if facts.path is None or (facts.format or "parquet").lower() not in _FILE_FORMATS:
        return None
    folder = find_local_folder(facts.path)
    return None if folder is None else folder / "_spark_metadata"


def choose_rewind(facts: WriterFacts, *, repeatable: bool) -> SinkRewind:
    """Return how the sink of a query follows a restore; the script has run up to its start.

    The first that holds: by the script's callback, by repeating if the sink is `repeatable` or
    keeps nothing, by its log if it is a local file sink, by a rollback if it is an Iceberg or Delta
    table; else a restore is refused.
    """
    if find_restore_callback(facts.name or ""):
        return SinkRewind.CALLBACK
    if repeatable or facts.format in _KEEP_NOTHING:
        return SinkRewind.REPEAT
    if find_sink_log(facts):
        return SinkRewind.LOG
    return SinkRewind.ROLLBACK if can_roll_back(facts) else SinkRewind.REFUSED


def restore_sink(
    pipeline: str, facts: WriterFacts, folder: Path, point: SealedPoint, rewind: SinkRewind
) -> None:
    """Bring the sink to a batch, before the query starts from a new checkpoint folder.

    A file sink gets its sealed log back; later files stay and are not read. A table is rolled
    back. A callback is called, and its errors pass through. Another sink is left as it is; if it
    cannot repeat a batch either, a warning is logged.

    Args:
        pipeline: name of the job.
        facts: of the query.
        folder: its checkpoint as it was sealed, with the sealed log of a file sink.
        point: what the sink should hold.
        rewind: how.
    """
    query, batch, sink_log = facts.name or "", point.batch, find_sink_log(facts)
    callback = find_restore_callback(query)
    if sink_log is not None:
        # Also beside a callback: Spark skips batches that the log of a file sink has already.
        _replace_log(sink_log, folder / SINK_LOG)
    if rewind is SinkRewind.CALLBACK and callback is not None:
        _run_callback(callback, query, batch)
    elif rewind is SinkRewind.ROLLBACK:
        roll_back_table(pipeline, facts, point)
    elif rewind is SinkRewind.REFUSED:
        # A restore was refused before it was committed, so this is a launch on a new folder.
        _log.warning(
            "batch_may_repeat",
            pipeline=pipeline,
            query=query,
            after_batch=batch,
            advice="tidegate.job.on_restore can take back what a lost driver has written",
        )


def _run_callback(
    callback: Callable[[str, int | None], object], query: str, batch: int | None
) -> None:
    _log.info("on_restore", query=query, batch=batch)
    callback(query, batch)


def _replace_log(live: Path, sealed: Path) -> None:
    """Replace the log of a file sink by the sealed one. Files of later batches stay, unread."""
    kept = {path.name: path for path in sealed.iterdir()} if sealed.is_dir() else {}
    live.mkdir(parents=True, exist_ok=True)
    # First what is missing, so that a crash leaves a log that still names all that it should.
    for name, path in kept.items():
        shutil.copyfile(path, live / name)
        (live / f".{name}.crc").unlink(missing_ok=True)
    for path in list(live.iterdir()):
        if path.name not in kept and not path.is_dir():
            path.unlink()
