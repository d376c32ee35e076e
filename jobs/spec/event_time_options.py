"""The options of semantics.md section 2, as frozen models.

Names, choices and defaults are those of the table; `None` stands for its *off*, *none* or *never*,
which YAML writes as ``never`` (timeouts) or leaves out. A preset (see `presets`) sets other
defaults, a pipeline's own YAML wins.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from tidegate.time_units import Duration, SignedDuration


class SpecModel(BaseModel):
    """Base of every spec model: frozen, unknown fields are errors."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)


def _parse_never(value: Any) -> Any:
    return None if value in ("never", "off", "none") else value


def _parse_frame(value: Any) -> Any:
    return 0 if value == "never" else _parse_never(value)


OptionalDuration = Annotated[Duration | None, BeforeValidator(_parse_never)]
"""A duration, or ``never``."""


class ReleaseMode(StrEnum):
    """When a row leaves to the events output (semantics.md section 1, release modes)."""

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
    """Least or greatest frontier of the included members."""
    idle_timeout: OptionalDuration = 60_000_000
    """A member with nothing pending for this long is idle; ``never`` switches idleness off."""
    all_idle: Literal["jump", "hold"] = "jump"
    """When every member is idle: jump to the largest time frontier seen, or hold."""
    all_done: Literal["infinity", "hold"] = "infinity"
    """When every member is done: the frontier goes to +inf, or holds."""
    revived: Literal["ignore", "freeze"] = "ignore"
    """A member active again behind F: leave it out until it caught up, or freeze F until then."""
    on_idle_punctuation: Literal["revive", "ignore"] = "revive"
    """Whether punctuation of an idle member revives it.

    A partition of its source, or (output level) a source as a whole.
    """
    joins: Literal["at_F", "hold"] = "at_F"
    """A new member starts at F, or holds F until it has a frontier."""
    members: Literal["declared", "discovered"] = "declared"
    """Members are known from the spec, or appear with their first event."""
    no_members: Literal["idle", "silent"] = "idle"
    """What is emitted before the first member: idle, or nothing."""

    @model_validator(mode="after")
    def _require_positive_timeout(self) -> Self:
        if self.idle_timeout is not None and self.idle_timeout <= 0:
            raise ValueError("idle_timeout must be positive, or 'never'")
        return self


class WallClockOptions(SpecModel):
    """A frontier taken from the recorded wall clock."""

    lag: Duration
    """How far behind the recorded `now` the frontier stands."""
    cap: bool = True
    """Never pass the largest time read in the epoch."""


class PunctuationOptions(SpecModel):
    """Explicit, generated or imported punctuation (CTI) of a source (semantics.md section 4)."""

    explicit: bool = False
    """The source carries punctuation rows (see the source's `barriers`/`kind` column)."""
    every_events: Annotated[int, Field(gt=0)] | None = None
    """Generate after N events."""
    every_span: Annotated[Duration, Field(gt=0)] | None = None
    """Generate after a span of event time."""
    delay: SignedDuration = 0
    """Subtracted from the newest row's start; -1 tick commits the newest row at once."""
    align: Literal["after", "floor"] = "after"
    """After the newest row (start - delay), or on multiples of the span, ahead of the row."""
    import_from: str | None = None
    """Take the frontier from this other source."""
    regress: Literal["ignore", "error", "raise"] = "ignore"
    """Punctuation below the current one: ignore and count, fail, or raise it to the current one."""
    on_violation: Literal["error", "drop", "adjust"] = "error"
    """A row before the punctuation of its own member.

    Error row, drop and count, or adjust its start.
    """
    advance_to_end: bool = False
    """On completion of a bounded source the frontier goes to +inf."""

    @property
    def is_generated(self) -> bool:
        """Whether tidegate makes the punctuation itself."""
        return self.every_events is not None or self.every_span is not None


class FrontierOptions(SpecModel):
    """How one member's frontier follows its rows (semantics.md section 1, member frontier)."""

    lag: SignedDuration | None = None
    """Heuristic: frontier = largest time seen - lag.

    Required unless punctuated, imported or by wall clock.
    """
    frontier: Literal["exclusive", "inclusive"] = "exclusive"
    """Exclusive: no later row below F.

    Inclusive: none at or below F, which shifts F by one tick.
    """
    frame: Annotated[Duration | None, BeforeValidator(_parse_frame)] = None
    """Round the emitted frontier down to a multiple of this.

    ``never`` (or 0) emits none, ``off`` does not round.
    """
    punctuation: PunctuationOptions | None = None
    wall_clock: WallClockOptions | None = None
    max_jump: OptionalDuration = None
    """A row further ahead of its partition's newest and of the recorded now than this is quarantined."""


class BarrierOptions(SpecModel):
    """Barrier events that synchronise sources (semantics.md section 3)."""

    identity: Literal["id", "ordinal"] = "ordinal"
    """Pair barriers by their id, or number them per source with resynchronisation."""
    timeout: OptionalDuration = None
    """Counted from max(first arrival, previous close), strictly greater.

    Then incomplete or aborted.
    """
    on_timeout: Literal["incomplete", "abort"] = "incomplete"
    """Run control closes as incomplete; the checkpoint class aborts."""
    overtake: Literal["queue", "subsume"] = "queue"
    """A later barrier while one is open.

    Both count, or the open one aborts and its sources unblock.
    """
    alignment: Literal["block", "pass"] = "block"
    """Hold data behind a barrier (exactly once), or let it flow (watermarks never pass)."""


class GlomOptions(SpecModel):
    """Group ordered rows into built events, one row each of the table ``built`` (semantics.md section 3.8)."""

    dt: Duration
    """A row within dt of the group's first row joins it; 0 groups equal stamps."""
    max_rows: Annotated[int, Field(gt=0)] = 1000
    stamp: Literal["earliest", "latest", "mean"] = "earliest"


class OrderOptions(SpecModel):
    """Release of rows to the events output."""

    mode: ReleaseMode = ReleaseMode.ORDERED
    build_window: OptionalDuration = None
    """Residence limit in the order buffer, by the recorded now of reading; off is not 0."""
    startup_grace: Duration = 0
    """Wait this long after the first event of a run."""
    on_late: LatePolicy = LatePolicy.SIDE_OUTPUT
    glom: GlomOptions | None = None
    max_buffered_rows: Annotated[int, Field(gt=0)] = 5_000_000
    """Back-pressure.

    With more rows than this in the order buffer, members ahead of the frontier are not read.
    """
    max_ahead: OptionalDuration = None
    """Back-pressure.

    A member this far ahead of the output frontier is not read while others have rows.
    """

    @model_validator(mode="after")
    def _require_order_for_glom(self) -> Self:
        if self.glom is not None and self.mode is ReleaseMode.PASS_THROUGH:
            raise ValueError(
                "glom groups rows that leave in order: it needs mode 'ordered' or 'commit'"
            )
        return self
