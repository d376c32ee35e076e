"""What must hold of the sinks besides the tables.

A database holds each epoch once; a receiver can tell which epochs count.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from tests.simulation.basics import Violation
from tests.simulation.cheap import rows_of
from tests.simulation.servers import Brokers, Database, Receiver

from tidegate.checkpoints.bucket_layout import CheckpointId
from tidegate.checkpoints.canonical_json import parse_json
from tidegate.checkpoints.manifest import Manifest
from tidegate.jobs.sinks.output_tables import build_checkpoint_rows
from tidegate.jobs.sinks.published_tables import to_json_line
from tidegate.jobs.spec.pipeline import CHECKPOINTS

if TYPE_CHECKING:
    from tests.simulation.actors import Stage


def judge_sink(stage: Stage, lineage: list[Manifest], head: tuple[int, int]) -> None:
    """Look at the sink of the schedule, if it has one.

    Raises:
        Violation: what is wrong, in one line.
    """
    if isinstance(stage.server, Database):
        _exactly_once(stage, stage.server, lineage, head)
    elif isinstance(stage.server, Brokers):
        _exactly_once_in_topics(stage, stage.server, lineage, head)
    elif isinstance(stage.server, Receiver):
        _at_least_once(stage, stage.server, lineage)


def _exactly_once(
    stage: Stage, database: Database, lineage: list[Manifest], head: tuple[int, int]
) -> None:
    """Ledger and rows are those of the lineage; an upserted window has its newest revision."""
    if lineage and (database.ledger is None or database.ledger[1:] != head):
        raise Violation(f"the ledger stands at {database.ledger}, the log at {head}")
    for table in stage.spec.table_names:
        there = database.tables.get(table, [])
        if table == CHECKPOINTS:
            has, wanted = (
                Counter(str(row["slot"]) for row in there),
                Counter(str(epoch.slot) for epoch in lineage),
            )
        else:
            has, wanted = (
                Counter(map(_text, there)),
                Counter(map(_text, _wanted(stage, table, lineage))),
            )
        if has != wanted:
            raise Violation(
                f"the database's {table}: missing {_first(wanted - has)}, too many"
                f" {_first(has - wanted)}"
            )


def _wanted(stage: Stage, table: str, lineage: list[Manifest]) -> list[dict[str, Any]]:
    rows = [
        row
        for epoch in lineage
        for file in epoch.files.get(table, [])
        for row in rows_of(stage.world.bucket.written[file.key])
    ]
    window = stage.spec.windows.get(table)
    if window is None or window.revisions == "delta":  # a delta takes the place of no other
        return rows
    return [
        *{
            row["window_start"]: row for row in sorted(rows, key=lambda row: row["revision"])
        }.values()
    ]


def _exactly_once_in_topics(
    stage: Stage, brokers: Brokers, lineage: list[Manifest], head: tuple[int, int]
) -> None:
    """A reader who drops what no longer counts at each notice has the rows of the lineage."""
    if lineage and brokers.ledger != head:
        raise Violation(f"the group's offset says {brokers.ledger}, the log {head}")
    for table in stage.spec.table_names:
        has: Counter[tuple[str, str | None]] = Counter()
        for message in brokers.messages:
            if message.topic != table:
                continue
            headers = dict(message.headers)
            if "tidegate-restore" in headers:
                counts = parse_json(headers["tidegate-restore"])["lineage"]
                has = Counter(
                    {
                        row: n
                        for row, n in has.items()
                        if _counts(counts, CheckpointId.parse(row[0]))
                    }
                )
            else:
                has[headers["tidegate-epoch"].decode(), message.value] += 1
        wanted: Counter[tuple[str, str | None]] = Counter(
            (str(epoch.id), to_json_line(row))
            for epoch in lineage
            for row in _epoch_rows(stage, epoch, table)
        )
        if has != wanted:
            missing, more = _first(wanted - has), _first(has - wanted)
            raise Violation(f"the topic {table}: missing {missing}, too many {more}")


def _epoch_rows(stage: Stage, epoch: Manifest, table: str) -> Iterator[dict[str, Any]]:
    if table == CHECKPOINTS:
        yield from build_checkpoint_rows([epoch])
    for file in epoch.files.get(table, []):
        yield from rows_of(stage.world.bucket.written[file.key])


def _at_least_once(stage: Stage, receiver: Receiver, lineage: list[Manifest]) -> None:
    """Equal ids mean equal contents.

    An epoch is closed after its parts; what counts by the newest notice is the lineage.
    """
    contents: dict[str, bytes] = {}
    closed: dict[CheckpointId, dict[str, Any]] = {}
    notices: list[dict[str, Any]] = []
    for identity, data in receiver.arrived:
        if "restore" in identity:
            notices.append(parse_json(data))
            continue
        if contents.setdefault(identity, data) != data:
            raise Violation(f"{identity} was delivered with two contents")
        name = identity.removeprefix("_epochs/").removesuffix(".json")
        if "/" not in name:
            epoch, body = CheckpointId.parse(name), parse_json(data)
            _complete(epoch, body, contents)
            closed[epoch] = body
    stretches = (
        max(notices, key=lambda notice: notice["timeline"])["lineage"]
        if notices
        else [{"timeline": 0, "first": 1, "last": None}]
    )
    count = {epoch for epoch in closed if _counts(stretches, epoch)}
    wanted = {epoch.id for epoch in lineage}
    if count != wanted:
        raise Violation(
            f"a receiver counts {sorted(map(str, count - wanted))} too many and misses"
            f" {sorted(map(str, wanted - count))}"
        )


def _complete(epoch: CheckpointId, body: dict[str, Any], contents: dict[str, bytes]) -> None:
    """Whatever the closing message names has arrived before it."""
    if "files" in body:
        missing = [key for key in body["files"] if key not in contents]
    else:
        parts = {table for table, rows in body["rows"].items() if rows}
        missing = [table for table in parts if f"{epoch}/{table}/0" not in contents]
    if missing:
        raise Violation(f"{epoch} was closed before {missing[0]} arrived")


def _counts(stretches: list[dict[str, Any]], epoch: CheckpointId) -> bool:
    return any(_holds(stretch, epoch) for stretch in stretches)


def _holds(stretch: dict[str, Any], epoch: CheckpointId) -> bool:
    last = stretch["last"]
    return (
        epoch.timeline == stretch["timeline"]
        and stretch["first"] <= epoch.slot
        and (last is None or epoch.slot <= last)
    )


def _text(row: dict[str, Any]) -> str:
    return repr(sorted(row.items()))


def _first(found: Counter[Any]) -> str:
    return next(iter(map(str, found)), "nothing")
