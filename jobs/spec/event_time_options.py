"""The event-time options of a pipeline as frozen models (docs/semantics.md, section 2).

`None` means *off*, *none* or *never*; YAML writes ``never`` or leaves the field out. A preset (see
`presets`) sets other defaults, and the YAML of the pipeline overrides them.
"""

import ast
import inspect
from collections.abc import Iterable, Iterator
from enum import StrEnum
from itertools import pairwise
from typing import Annotated, Any, Final, Literal, Self, TypeVar, cast

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    GetJsonSchemaHandler,
    PlainSerializer,
    PositiveInt,
    WrapValidator,
    model_validator,
)
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema

from tidegate.time_units import (
    TICK_MAX,
    Duration,
    PositiveDuration,
    SignedDuration,
    format_duration,
)


class SpecModel(BaseModel):
    """Base of every spec model: frozen, unknown fields are errors."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    @classmethod
    def __get_pydantic_json_schema__(
        cls, core_schema: CoreSchema, handler: GetJsonSchemaHandler
    ) -> JsonSchemaValue:
        """Describe each field by the docstring below it.

        pydantic's `use_attribute_docstrings` reads the source of every model at import. Airflow's
        DAG processor imports the models whenever it parses, and that would be half of the cost.
        """
        schema = handler(core_schema)
        properties = handler.resolve_ref_schema(schema)["properties"]
        for name, text in _read_field_docstrings(cls).items():
            field = cls.model_fields[name]
            if field.description is None:
                properties[field.alias or name]["description"] = text
        return schema

    @model_validator(mode="after")
    def _refuse_problems(self) -> Self:
        for problem in self._list_problems():
            raise ValueError(problem)
        return self

    def _list_problems(self) -> Iterable[str]:
        """Say which options do not fit together; the first problem counts."""
        return ()


def _read_field_docstrings(model: type[SpecModel]) -> dict[str, str]:
    """The string literal that follows a field in the source, those of the base models included."""
    found: dict[str, str] = {}
    for owner in reversed(model.__mro__[: model.__mro__.index(SpecModel)]):
        definition = cast(ast.ClassDef, ast.parse(inspect.getsource(owner)).body[0])
        for field, text in pairwise(definition.body):
            match field, text:
                case (
                    ast.AnnAssign(target=ast.Name(id=name)),
                    ast.Expr(value=ast.Constant(value=str(docstring))),
                ):
                    found[name] = inspect.cleandoc(docstring)
    return found


T = TypeVar("T")
# A field that is newer than its model is left out where it is not used, so that older specs keep
# their digests, and older records their bytes.
OmittedIfNone = Annotated[T | None, Field(exclude_if=lambda value: value is None)]
OmittedIfEmpty = Annotated[T, Field(exclude_if=lambda value: not value)]


def _parse_never(value: Any) -> Any:
    return None if value in ("never", "off", "none") else value


NEVER: Final = TICK_MAX
"""``never`` for an option that has another meaning if it is left out."""
BarrierTimeout = Annotated[
    Duration | None,
    WrapValidator(
        lambda value, parse: NEVER if value in ("never", "off", "none") else parse(value)
    ),
    PlainSerializer(
        lambda ticks: "never" if ticks == NEVER else format_duration(ticks),
        when_used="json-unless-none",
    ),
]
"""A duration or ``never``; None if it is left out."""
OptionalDuration = Annotated[Duration | None, BeforeValidator(_parse_never)]
"""A duration, or ``never``."""


class ReleaseMode(StrEnum):
    """When a row leaves to the events output (docs/semantics.md, "Release modes")."""

    ORDERED = "ordered"
    PASS_THROUGH = "pass_through"
    COMMIT = "commit"


class LatePolicy(StrEnum):
    """What happens to a late row (option ``on_late``)."""

    SIDE_OUTPUT = "side_output"
    ADJUST = "adjust"
    ERROR = "error"
    EMIT_FLAGGED = "emit_flagged"
    DROP = "drop"
    REJECT_TO_ORIGIN = "reject_to_origin"


class CoalesceOptions(SpecModel):
    """How member frontiers join into one.

    Set per level: partitions into a source, sources into the output.
    """

    coalesce: Literal["min", "max"] = "min"
    """Take the least or the greatest frontier of the included members."""
    idle_timeout: OptionalDuration = 60_000_000
    """A member with nothing pending for this long is idle. ``never`` switches idleness off."""
    all_idle: Literal["jump", "hold"] = "jump"
    """When every member is idle, the frontier jumps to the largest time seen, or holds."""
    all_done: Literal["infinity", "hold"] = "infinity"
    """When every member is done, the frontier goes to +inf, or holds."""
    revived: Literal["ignore", "freeze"] = "ignore"
    """A member that becomes active again behind F is left out until it has caught up, or
    freezes F until then.
    """
    on_idle_punctuation: Literal["revive", "ignore"] = "revive"
    """Whether punctuation of an idle member makes it active: of a partition in its source, or
    (output level) of a source as a whole.
    """
    joins: Literal["at_F", "hold"] = "at_F"
    """A new member starts at F, or holds F until it has a frontier."""
    members: Literal["declared", "discovered"] = "declared"
    """Members are listed in the spec, or appear with their first event."""
    no_members: Literal["idle", "silent"] = "idle"
    """What is emitted before the first member: the status idle, or nothing."""

    def _list_problems(self) -> Iterator[str]:
        # With a timeout of 0 every member would be idle in every epoch, and the frontier would
        # ignore all of them.
        if self.idle_timeout is not None and self.idle_timeout <= 0:
            yield "idle_timeout must be positive, or 'never'"


class WallClockOptions(SpecModel):
    """A frontier taken from the recorded wall clock."""

    lag: Duration
    """How far the frontier stays behind the recorded `now`."""
    cap: bool = True
    """The frontier never passes the largest time read in the epoch."""


class PunctuationOptions(SpecModel):
    """Explicit, generated or imported punctuation (CTI); docs/semantics.md, section 4."""

    explicit: bool = False
    """The source carries punctuation rows; see `barriers.punctuation` of the source."""
    every_events: PositiveInt | None = None
    """Generate punctuation after this number of events."""
    every_span: PositiveDuration | None = None
    """Generate punctuation after this span of event time."""
    delay: SignedDuration = 0
    """Subtracted from the newest row's start; -1 tick commits the newest row at once."""
    align: Literal["after", "floor"] = "after"
    """Place generated punctuation after the newest row (start - delay), or on multiples of the
    span, before the row.
    """
    import_from: str | None = None
    """Take the frontier from this other source."""
    regress: Literal["ignore", "error", "raise"] = "ignore"
    """Punctuation below the current one: ignore and count it, fail, or raise it to the current
    one.
    """
    on_violation: Literal["error", "drop", "adjust"] = "error"
    """A row before the punctuation of its own member: treat it as an error row, drop and count
    it, or adjust its start.
    """
    advance_to_end: bool = False
    """When a bounded source is complete, its frontier goes to +inf."""

    @property
    def is_generated(self) -> bool:
        """Whether tidegate generates the punctuation, instead of reading it from rows."""
        # Explicit and imported punctuation come from outside: from rows, or from another source.
        return self.every_events is not None or self.every_span is not None


class FrontierOptions(SpecModel):
    """How one member's frontier follows its rows (docs/semantics.md, "Member frontier")."""

    lag: SignedDuration | None = None
    """The frontier is the largest time seen minus the lag.

    Required unless the source has punctuation or a wall clock.
    """
    frontier: Literal["exclusive", "inclusive"] = "exclusive"
    """Exclusive: no later row lies below F.

    Inclusive: no later row lies at or below F, which shifts F by one tick.
    """
    # `never` means two things: here "emit no frontier" (0), elsewhere "switched off" (None).
    frame: Annotated[OptionalDuration, BeforeValidator(lambda v: 0 if v == "never" else v)] = None
    """Round the emitted frontier down to a multiple of this.

    ``never`` (or 0) emits none, ``off`` does not round.
    """
    punctuation: PunctuationOptions | None = None
    """Take the frontier from punctuation instead of `lag`."""
    wall_clock: WallClockOptions | None = None
    """Take the frontier from the recorded wall clock instead of `lag`."""
    max_jump: OptionalDuration = None
    """A row further ahead than this of its partition's newest row and of the recorded now is
    quarantined.
    """


class BarrierOptions(SpecModel):
    """Barrier events that synchronise sources (docs/semantics.md, section 3)."""

    identity: Literal["id", "ordinal"] = "ordinal"
    """Pair barriers by their id, or number them per source with resynchronisation."""
    timeout: BarrierTimeout = None
    """A barrier open for longer than this is closed.

    The time counts from the later of its first arrival and the previous close. By default it is
    four times `release.build_window`. There is no timeout if that is not set, or with ``never``.
    """
    on_timeout: Literal["incomplete", "abort"] = "incomplete"
    """What the timeout does: close the barrier as incomplete, or abort it."""
    overtake: Literal["queue", "subsume"] = "queue"
    """A later barrier while one is open: both count, or the open one aborts and its sources
    unblock.
    """
    alignment: Literal["block", "pass"] = "block"
    """Hold data behind a barrier (exactly once), or let it flow. Frontiers never pass a barrier."""


class GlomOptions(SpecModel):
    """Groups ordered rows into built events, rows of the table ``built``.

    Rule: docs/semantics.md, section 3.8.
    """

    dt: Duration
    """A row within `dt` of the group's first row joins the group; 0 groups rows of one instant."""
    max_rows: PositiveInt = 1000
    """A group with this many rows is closed."""
    stamp: Literal["earliest", "latest", "mean"] = "earliest"
    """Event time of a built event: that of its earliest or latest row, or their mean."""


class OrderOptions(SpecModel):
    """Release of rows to the events output."""

    mode: ReleaseMode = ReleaseMode.ORDERED
    """Rows leave sorted by event time, as they are read, or sorted when the frontier commits
    them.
    """
    build_window: OptionalDuration = None
    """The longest time that a row stays in the order buffer, by the recorded now of reading.

    ``off`` is not 0.
    """
    startup_grace: Duration = 0
    """Wait this long after the first event of a run before anything leaves."""
    on_late: LatePolicy = LatePolicy.SIDE_OUTPUT
    """What happens to a row that is late for the order."""
    glom: GlomOptions | None = None
    """Group ordered rows into built events."""
    max_buffered_rows: PositiveInt = 5_000_000
    """Back-pressure: with more rows than this in the order buffer, members ahead of the
    frontier are not read.
    """
    max_ahead: OptionalDuration = None
    """Back-pressure: a member this far ahead of the output frontier is not read while others
    have rows.
    """

    @property
    def limits_adjusted_rows(self) -> bool:
        """Whether late rows are moved to the frontier, and a build window limits their stay."""
        return self.on_late is LatePolicy.ADJUST and self.build_window is not None

    def _list_problems(self) -> Iterator[str]:
        # Rows that leave as they are read are in no order, so "the group's first row" has no
        # meaning.
        if self.glom is not None and self.mode is ReleaseMode.PASS_THROUGH:
            yield "glom groups rows that leave in order: it needs mode 'ordered' or 'commit'"
