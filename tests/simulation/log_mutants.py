"""Bugs in the log, its store, restores and retention."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any
from unittest.mock import patch

from tests.simulation.planting import SEAL, Mutant, replace_seal, reword

from tidegate.checkpoints import errors, store_probe
from tidegate.checkpoints.checkpoint_catalog import CheckpointCatalog
from tidegate.checkpoints.errors import RECORD_MALFORMED
from tidegate.checkpoints.manifest import ForkRecord, Manifest
from tidegate.checkpoints.pins import RootsFile
from tidegate.checkpoints.retention import Retention
from tidegate.checkpoints.slot_log import Sealed, SlotLog, SlotTaken
from tidegate.checkpoints.store import (
    OutcomeUnknownError,
    PreconditionFailedError,
    StoreUnavailableError,
)


def _send_anyway(log: SlotLog, key: str, data: bytes) -> str | None:
    try:
        return log.store.put(key, data)
    except (OutcomeUnknownError, StoreUnavailableError):
        return None


def _believe_412(log: SlotLog, record: Manifest | ForkRecord) -> Sealed | SlotTaken:
    original = SlotLog._read_back_slot

    def seal(key: str, data: bytes) -> str | None:
        try:
            return log.store.create(key, data)
        except PreconditionFailedError:
            raise _NotMineError from None
        except (OutcomeUnknownError, StoreUnavailableError):
            return None

    try:
        with patch.object(log, "_send_record", seal):
            return SEAL(log, record)
    except _NotMineError:
        filled = original(log, log.layout.slot_key(record.timeline, record.slot))
        return SlotTaken(filled.record if filled else record, filled.sha256 if filled else "", "")


class _NotMineError(Exception):
    """A 412."""


_NEWEST = SlotLog.newest_record


_GARBAGE = Retention._unmarked_entries


def _newest_once(log: SlotLog, timeline: int) -> Any:
    known = log._newest
    return (
        known if known is not None and known.record.timeline == timeline else _NEWEST(log, timeline)
    )


def _garbage_of_all(retention: Retention, marked: Any) -> Iterator[Any]:
    return _GARBAGE(retention, replace(marked, bounds=dict.fromkeys(marked.bounds, 1 << 40)))


def _give_up(log: SlotLog, key: str, data: bytes) -> str | None:
    """An answer that did not come is taken for a success."""
    try:
        return log.store.create(key, data)
    except OutcomeUnknownError:
        return "surely"
    except (PreconditionFailedError, StoreUnavailableError):
        return None


def _select_all(retention: Retention, abandoned: list[Any], newest_kept: Any) -> set[str]:
    return {row.id for row in abandoned if row.id is not None}


def _no_claim(roots: RootsFile, *_: Any, **__: Any) -> Any:
    return roots.read()


def _call_damaged(where: str, **_: Any) -> Exception:
    return RECORD_MALFORMED(where=where, cause="an unknown version")


LOG_MUTANTS = (
    Mutant(
        "a record of a newer version counts as damaged",
        lambda: [patch.object(errors, "RECORD_OF_NEWER_FORMAT", _call_damaged)],
    ),
    Mutant(
        "one probe decides about a store",
        lambda: [patch.object(store_probe, "_PROBES", 1)],
        focus=("retried", "probe"),
        fault="F7",
    ),
    Mutant(
        "seal without condition",
        lambda: [patch.object(SlotLog, "_send_record", _send_anyway)],
        focus=("sleep", "seal"),
    ),
    Mutant(
        "a 412 taken as a loss without reading back",
        lambda: [replace_seal(_believe_412)],
        focus=("retried", "seal"),
    ),
    Mutant(
        "an unknown outcome taken as a success",
        lambda: [patch.object(SlotLog, "_send_record", _give_up)],
        0.1,
    ),
    Mutant(
        "the newest slot is the one that was read last",
        lambda: [patch.object(SlotLog, "newest_record", _newest_once)],
    ),
    Mutant(
        "GC of an undecided attempt",
        lambda: [patch.object(Retention, "_unmarked_entries", _garbage_of_all)],
        focus=("sleep", "seal"),
    ),
    Mutant(
        "restore without a claim",
        lambda: [patch.object(RootsFile, "claim", _no_claim)],
        focus=("sleep", "fork"),
    ),
    Mutant(
        "what is condemned does not count as retired",
        lambda: [
            reword(
                CheckpointCatalog,
                "mark_gaps",
                "retiring = self._roots.read().retiring_checkpoints",
                "retiring = set()",
            )
        ],
        focus=("sleep", "index"),
        fault="F24",
    ),
)
