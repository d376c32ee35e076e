"""The steps of a schedule, read from what its processes wrote, and taken by the rules of the protocol.

Nothing of the product is asked about the meaning of a write: steps follow from keys and contents.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any
from typing import Protocol as Interface

from tests.simulation.basics import PIPELINE, Violation
from tests.simulation.cheap import parsed
from tests.simulation.protocol_steps import (
    START,
    Claim,
    Protocol,
    Record,
    Slot,
    Table,
    UntakeableError,
)

from tidegate.checkpoints.canonical_json import sha256_of_bytes
from tidegate.jobs.spec.pipeline import CHECKPOINTS

_LAST_SLOT = 9_999_999_999  # of which the name of a slot's key is the distance
_SLOT = re.compile(r"timelines/(\d+)/slots/(\d+)\.json")
_ATTEMPT = re.compile(r"timelines/(\d+)/(?:state|tables/[^/]+)/(\d+)-([0-9a-f]+)/")
_COPIES = ("sinks/postgres.json", "sinks/kafka.json")  # of ledgers in the database, the brokers
Step = tuple[Any, ...]


class UntakenError(Violation):
    """The product took a step that the protocol does not allow."""


class _Version(Interface):
    """A version of a table, as the model of the catalog has it."""

    @property
    def main(self) -> Any:
        """Its newest snapshot; None before the first."""


class TraceJudge:
    """Takes the steps of one schedule.

    Attributes:
        steps: how many were taken.
        trace: the steps themselves, if they are kept.
    """

    def __init__(
        self, sinks: Iterable[str] = (), *, keep: bool = False, pipeline: str = PIPELINE
    ) -> None:
        self._pipeline = pipeline
        self._sinks = dict.fromkeys(sinks, START)
        self.protocol = Protocol(sinks=self._sinks)
        self.steps = 0
        self.trace: list[Step] | None = [] if keep else None

    def begin_again(self) -> None:
        """The bucket was wiped: another history begins."""
        self.protocol = Protocol(sinks=self._sinks)
        if self.trace is not None:
            self.trace.clear()

    def take(self, *step: Any) -> None:
        """Take a step.

        Raises:
            UntakenError: the protocol does not allow it now.
        """
        if self.trace is not None:
            self.trace.append(step)
        try:
            self.protocol = self.protocol.take(step)
        except UntakeableError as error:
            raise UntakenError(f"the protocol cannot take {step[0]}: {error}") from error
        self.steps += 1

    def wrote(self, key: str, data: bytes, versions: Mapping[str, _Version]) -> None:
        """An object was written."""
        part = key.partition("/")[2]
        slot = _SLOT.match(part)
        if slot is not None:
            self._filled((int(slot[1]), _LAST_SLOT - int(slot[2])), data)
        elif _ATTEMPT.match(part) or "/merged/" in part:
            if key not in self.protocol.files:
                self.take("write", key)
        elif part == "lease.json":
            raw = parsed(data)
            held = raw["holder"] and f"{raw['holder']['driver']}:{raw['holder']['pid']}"
            self.take("hold", raw["token"], held)
        elif part == "roots.json":
            self._protected(parsed(data))
        elif part == "iceberg/current.json":
            raw = parsed(data)
            tables = {name: table_of(versions[at]) for name, at in raw["tables"].items()}
            self.take("publish", (raw["timeline"], raw["upto"]), tables)
        elif part.startswith("sinks/") and part not in _COPIES:
            raw = parsed(data)
            self.take("apply", part[6:-5], (raw["timeline"], raw["upto"]))

    def removed(self, key: str) -> None:
        """An object was deleted."""
        part = key.partition("/")[2]
        attempt = _ATTEMPT.match(part)
        if attempt is not None:
            slot = int(attempt[1]), int(attempt[2])
            self.take("delete", key, slot, _name(slot, attempt[3]))
        elif "/merged/" in part:
            self.take("delete", key, None, "")

    def _filled(self, slot: Slot, data: bytes) -> None:
        raw = parsed(data)
        if raw["kind"] == "stub":
            self.take("retire", slot, raw["original_sha256"])
            return
        sha = sha256_of_bytes(data)
        there = self.protocol.slots.get(slot)
        if there is not None and there.sha == sha:
            return  # the same request, twice
        if raw["kind"] == "fork":
            record = Record("fork", f"fork {slot}", sha, raw["parent_sha256"])
            new = raw["new_timeline"], raw["fork_slot"], raw["recover_to"]
            self.take("fork", slot, record, *new)
        else:
            self.take("seal", slot, epoch_of(slot, raw, sha, self._pipeline))

    def _protected(self, raw: dict[str, Any]) -> None:
        claims = {
            Claim(one["checkpoint"], (one["timeline"], one["slot"]))
            for one in raw["claims"].values()
        }
        pins = {pin["checkpoint"] for pin in raw["pins"].values()}
        condemned = raw["condemned"].items()
        retiring = {name for name, entry in condemned if entry["reason"] == "retired"}
        damaged = {name for name, entry in condemned if entry["reason"] == "damaged"}
        sets = (frozenset(claims), frozenset(pins), frozenset(retiring), frozenset(damaged))
        self.take("protect", *sets)


def epoch_of(slot: Slot, raw: dict[str, Any], sha: str, pipeline: str = PIPELINE) -> Record:
    """The record of a manifest; the publisher's own file in `checkpoints` belongs to it."""
    name = _name(slot, raw["attempt"])
    rows = {
        (table, file["key"])
        for table, files in raw["files"].items()
        for file in files
        if file["rows"]
    }
    files = {file["key"] for files in raw["files"].values() for file in files}
    files |= {file["key"] for file in raw["segments"]}
    own = f"timelines/{slot[0]}/tables/{CHECKPOINTS}/{name.partition('-')[2]}/publisher.parquet"
    rows.add((CHECKPOINTS, f"{pipeline}/{own}"))
    parent = raw["parent_sha256"]
    return Record("epoch", name, sha, parent, frozenset(files), frozenset(rows))


def table_of(version: _Version) -> Table:
    """The position and the files of a version of a table."""
    main = version.main
    if main is None:
        return Table(START)
    files = frozenset(main.files)
    twice = {"a file twice"} if len(files) < len(main.files) else set()
    return Table((main.mark.timeline, main.mark.upto), files | twice)


def _name(slot: Slot, attempt: str) -> str:
    return f"t{slot[0]}-{slot[1]:06d}-{attempt}"
