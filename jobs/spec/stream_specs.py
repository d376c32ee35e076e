"""Streams of a pipeline, and the pipes and reducers that dispatch rows to them.

Rule: docs/semantics.md, section 6.

Everything starts at `events`, the rows a pipeline releases. Which stream has which columns, and in
which order streams are worked on, follows from the spec alone (`StreamGraph`).
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from graphlib import CycleError, TopologicalSorter
from typing import Annotated, Any, Final, Literal

from pydantic import (
    BeforeValidator,
    ConfigDict,
    Field,
    NonNegativeInt,
    PositiveInt,
    field_validator,
)

from tidegate.time_units import Instant

from .event_time_options import SpecModel
from .table_layout import ColumnTypes
from .window_specs import Aggregate

EVENTS_STREAM: Final = "events"
"""The stream that all others come from.

What the pipeline releases, its positions, and the running maximum of its event times.
"""
REJECTIONS: Final = "rejections"
"""The table of dispatches that a destination refused: the log of their origin streams."""
RUNNING_AGGREGATES = ("count", "sum", "min", "max", "first", "last")
"""Aggregates that a reducer can keep from event to event."""
_SYSTEM_STREAM_COLUMNS = ("position", "stream_time")
_FUNCTION_PATH_PATTERN = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*\Z")
_KEYED_INHERIT_MESSAGE = (
    "a pipe with keys must not inherit: each key is a substream of its own, so the stamps of"
    " different keys come in any order, and the destination would reject the rows of every key that"
    " is behind; leave inherit out and the destination stamps them"
)


class StreamSpec(SpecModel):
    """A stream: append-only, positions contiguous from zero, its time never going back."""

    columns: dict[str, str] = Field(default={}, alias="schema")
    """Column name and type.

    By default those of the stream that its pipes read; a stream that reducers write to must list
    them.
    """
    buffer: bool = False
    """Put an ordered stage in front: rows wait until the frontier has passed their stamps,
    leave in order, and are never rejected.
    """


class AttachmentSpec(SpecModel, ABC):
    """What pipes and reducers have in common."""

    model_config = ConfigDict(populate_by_name=True)

    origin: str = Field(alias="from")
    """The stream whose rows are dispatched: `events` or one of `streams`."""
    inherit: bool = False
    """Rows keep their parent's stamp (in the backfill of a splice they always do).

    Otherwise the destination stamps them.
    """
    merge: Literal["concat", "splice"] = "concat"
    """What happens to the rows that exist when the attachment is made: append them, or collect
    them in a splice request.
    """
    attach: Literal["at_start", "on_request"] = "at_start"
    """Attach at the first epoch that has it in its spec, or when `tidegate attach` requests it."""
    rows_per_epoch: PositiveInt = 1_000_000
    """Largest number of origin rows that one epoch takes; a long backfill is spread over
    several epochs.
    """

    @property
    @abstractmethod
    def destinations(self) -> tuple[str, ...]:
        """Streams it may write to; the first is the default."""


class PipeSpec(AttachmentSpec):
    """Copies selected rows of one stream to another: those that all its conditions select."""

    to: str
    """Stream that receives the rows."""
    where: str | None = None
    """SQL over the origin's columns (DuckDB's dialect); rows for which it is true are copied."""
    positions: tuple[NonNegativeInt, NonNegativeInt | None] = (0, None)
    """Range of positions: from, and to (exclusive)."""
    times: tuple[Instant | None, Instant | None] = (None, None)
    """Range of stream time: from, and to (exclusive)."""
    keys: dict[str, Annotated[tuple[Any, ...], Field(min_length=1)]] = {}
    """Column and the values that select a row."""

    def _list_problems(self) -> Iterator[str]:
        if self.keys and self.inherit:
            yield _KEYED_INHERIT_MESSAGE

    @property
    def destinations(self) -> tuple[str, ...]:
        """The one stream that it copies to."""
        return (self.to,)


class ReducerSpec(AttachmentSpec):
    """A deterministic fold over a stream, or over each of its keys.

    The fold maps (state, event, index) to the next state and the rows to dispatch.
    """

    to: Annotated[
        tuple[str, ...],
        BeforeValidator(lambda to: (to,) if isinstance(to, str) else to),
        Field(min_length=1),
    ]
    """Streams that the reducer may write to; the first is the default."""
    function: str | None = None
    """Import path ``package.module:function``.

    It gets the state, the event (``event["column"]``, ``event.time``, ``event.id``)
    and the index of the event within the stream or key; it returns the new state and the rows to
    dispatch, as mappings for the first destination or as pairs (destination, mapping). The state
    must be JSON.
    """
    aggregates: dict[str, Aggregate] = {}
    """Instead of a function.

    Running aggregates over SQL expressions (DuckDB's dialect), from the first event on. Every event
    dispatches one row: the key columns and these. Numbers, texts and booleans only: the state must
    be JSON.
    """
    keys: tuple[str, ...] = ()
    """Key columns: one state per key. Without keys the stream has one state."""
    initial: Any = None
    """State before the first row."""
    recheck: NonNegativeInt = 100
    """Number of rows of each batch that are folded a second time, with side effects refused, to
    detect folds that are not deterministic.
    """

    @field_validator("function")
    @classmethod
    def _require_function_path(cls, value: str | None) -> str | None:
        if value is not None and not _FUNCTION_PATH_PATTERN.match(value):
            raise ValueError(f"write it as package.module:function; got {value!r}")
        return value

    def _list_problems(self) -> Iterator[str]:
        # Both would be two folds over one state, none would dispatch nothing.
        if (self.function is None) == (not self.aggregates):
            yield "a reducer has either a 'function' or 'aggregates'"
        strange = [
            str(one) for one in self.aggregates.values() if one.function not in RUNNING_AGGREGATES
        ]
        if strange:
            yield f"{strange[0]} does not run along; choose from {', '.join(RUNNING_AGGREGATES)}"
        # A running aggregate dispatches one row per event, which has no rule to choose a
        # destination.
        if self.aggregates and len(self.to) > 1:
            yield "aggregates go to one destination; 'to' names several"
        if self.merge == "splice" and len(self.to) > 1:
            yield (
                "a splice collects one request, which the owner of one destination merges or"
                " rejects; 'to' names several"
            )

    @property
    def destinations(self) -> tuple[str, ...]:
        """The streams in `to`."""
        return self.to


@dataclass(frozen=True)
class StreamGraph:
    """Streams in the order in which they can be worked on, their columns, and who reads what.

    Attributes:
        order: stream names; `events` first.
        columns: stream -> column -> type, without tidegate's own columns.
        attachments: name -> pipe or reducer, in the order of the spec, pipes first.
    """

    order: tuple[str, ...]
    columns: Mapping[str, ColumnTypes]
    attachments: Mapping[str, PipeSpec | ReducerSpec]

    @classmethod
    def build(
        cls,
        events: ColumnTypes,
        streams: Mapping[str, StreamSpec],
        pipes: Mapping[str, PipeSpec],
        reducers: Mapping[str, ReducerSpec],
    ) -> StreamGraph:
        """Order the streams, each after those it is written from, and derive their columns.

        Raises:
            ValueError: an unknown or doubled name, a cycle, or columns that do not fit; the
                message names the field.
        """
        # Names of attachments are parts of row identities, states and requests.
        twice = set(pipes) & set(reducers)
        if twice:
            raise ValueError(f"reducers: {', '.join(sorted(twice))} is the name of a pipe as well")
        attachments: dict[str, PipeSpec | ReducerSpec] = {**pipes, **reducers}
        for name, one in attachments.items():
            _require_known_streams(_format_field_name(name, one), one, streams)
        columns: dict[str, ColumnTypes] = {EVENTS_STREAM: events}
        for stream in _sort_topologically(streams, attachments):
            # In topological order, because a stream without a schema takes the columns of its
            # origin.
            columns[stream] = _derive_stream_columns(stream, streams[stream], attachments, columns)
        for name, one in attachments.items():
            _require_matching_columns(_format_field_name(name, one), one, columns)
        return cls(tuple(columns), columns, attachments)

    def readers_of(self, stream: str) -> list[str]:
        """Return the names of the attachments that read this stream, in their order."""
        return [name for name, one in self.attachments.items() if one.origin == stream]

    def writers_of(self, stream: str) -> list[str]:
        """Return the names of the attachments that may write to this stream, in their order."""
        return [name for name, one in self.attachments.items() if stream in one.destinations]


def _format_field_name(name: str, one: AttachmentSpec) -> str:
    return f"{'pipes' if isinstance(one, PipeSpec) else 'reducers'}.{name}"


def _require_known_streams(
    field: str, one: AttachmentSpec, streams: Mapping[str, StreamSpec]
) -> None:
    listed = ", ".join(streams) or "none declared"
    if one.origin != EVENTS_STREAM and one.origin not in streams:
        raise ValueError(
            f"{field}.from: no stream named {one.origin!r}; there are events, {listed}"
        )
    for to in one.destinations:
        if to not in streams:
            why = " (events are what the sources give)" if to == EVENTS_STREAM else ""
            raise ValueError(
                f"{field}.to: no stream named {to!r} to write to{why}; there are {listed}"
            )


def _sort_topologically(
    streams: Mapping[str, StreamSpec], attachments: Mapping[str, PipeSpec | ReducerSpec]
) -> list[str]:
    """Every stream after those it is written from."""
    parents = {
        name: {a.origin for a in attachments.values() if name in a.destinations} - {EVENTS_STREAM}
        for name in streams
    }
    sorter = TopologicalSorter(parents)
    try:
        sorter.prepare()
    except CycleError as error:
        cycle = " <- ".join(reversed(error.args[1]))
        raise ValueError(f"streams: {cycle} is a cycle; rows would be dispatched forever") from None
    order: list[str] = []
    ready: set[str] = set()
    while sorter.is_active():
        # One at a time, so that streams are worked on in the order of the spec where they can be.
        ready |= {*sorter.get_ready()}
        order.append(next(name for name in streams if name in ready))
        ready.remove(order[-1])
        sorter.done(order[-1])
    return order


def _derive_stream_columns(
    stream: str,
    spec: StreamSpec,
    attachments: Mapping[str, PipeSpec | ReducerSpec],
    known: Mapping[str, ColumnTypes],
) -> ColumnTypes:
    reserved = [c for c in spec.columns if c.startswith("_") or c in _SYSTEM_STREAM_COLUMNS]
    if reserved:
        raise ValueError(f"streams.{stream}.schema: {', '.join(reserved)} is tidegate's own")
    if spec.columns:
        # As in the columns of sources, `decimal(6, 2)` and `decimal(6,2)` are one type.
        return {name: kind.replace(" ", "") for name, kind in spec.columns.items()}
    reducers = [
        name
        for name, one in attachments.items()
        if stream in one.destinations and isinstance(one, ReducerSpec)
    ]
    if reducers:
        raise ValueError(
            f"streams.{stream}.schema: needed, because the reducer {reducers[0]} writes to it"
        )
    origins = [one.origin for one in attachments.values() if stream in one.destinations]
    if not origins:
        raise ValueError(f"streams.{stream}: nothing writes to it, so it needs a schema")
    # With several origins the first one counts; `_require_matching_columns` refuses pipes with
    # other columns.
    return known[origins[0]]


def _require_matching_columns(
    field: str, one: PipeSpec | ReducerSpec, columns: Mapping[str, ColumnTypes]
) -> None:
    origin = columns[one.origin]
    missing = [key for key in one.keys if key not in origin]
    if missing:
        raise ValueError(
            f"{field}.keys: no column {', '.join(missing)} in {one.origin} ({', '.join(origin)})"
        )
    if isinstance(one, ReducerSpec) and one.aggregates:
        strangers = [
            name for name in (*one.keys, *one.aggregates) if name not in columns[one.to[0]]
        ]
        if strangers:
            raise ValueError(
                f"{field}.aggregates: {one.to[0]} has no column {', '.join(strangers)}"
            )
    # A pipe copies rows without casts, so names and types must be the same.
    if isinstance(one, PipeSpec) and dict(columns[one.to]) != dict(origin):
        raise ValueError(
            f"{field}.to: a pipe copies rows, but {one.to} has other columns than {one.origin}"
        )
