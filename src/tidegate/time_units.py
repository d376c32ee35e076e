"""Ticks and durations: the only units of time inside tidegate.

One tick is one microsecond. Instants are int64 ticks since 1970-01-01T00:00:00Z; durations are
ticks as well. Rule: semantics.md, head.
"""

import re
from datetime import UTC, datetime, timedelta
from typing import Annotated, Any, Final

from pydantic import BeforeValidator, Field, PlainSerializer, ValidationInfo, WithJsonSchema

TICK_MIN: Final = -(2**63)
TICK_MAX: Final = 2**63 - 1
TIME_BOUND: Final = 2**63 - 2**57
"""Ticks of a data row's times are at most so far from 0: some 288,000 years.

What is added to them for windows is at most 400,000 days a time, so no sum leaves int64.
"""

_TICKS_PER_UNIT = {
    "tick": 1,
    "us": 1,
    "ms": 1_000,
    "s": 1_000_000,
    "m": 60_000_000,
    "h": 3_600_000_000,
    "d": 86_400_000_000,
}
_DURATION_PART = re.compile(r"(\d+(?:\.\d+)?)\s*(tick|us|ms|s|m|h|d)")
_TICK_ZERO_INSTANT = datetime(1970, 1, 1, tzinfo=UTC)


def parse_duration(text: str | float | timedelta) -> int:
    """Parse ``10s``, ``1.5h``, ``1h30m``, ``-1tick``, a bare ``0`` or a timedelta into whole ticks.

    Exact up to 2**53 ticks, which is 285 years.

    Raises:
        ValueError: it is not a duration, or another number than 0 without a unit; the message
            lists what is allowed.
    """
    if isinstance(text, timedelta):
        return round(text / timedelta(microseconds=1))
    if isinstance(text, bool) or not isinstance(text, str):
        if text == 0 and not isinstance(text, bool):
            return 0
        raise ValueError(
            f"a duration needs a unit, like '10s' or '1h30m' (units: {', '.join(_TICKS_PER_UNIT)});"
            f" got {text!r}"
        )
    body = text.strip()
    sign = -1 if body.startswith("-") else 1
    body = body.lstrip("+-").replace(" ", "")
    if body == "0":
        return 0
    parts = _DURATION_PART.findall(body)
    if not parts or "".join(n + u for n, u in parts) != body:
        raise ValueError(
            f"not a duration: {text!r}; write for example '10s', '1h30m' or '250ms' (units:"
            f" {', '.join(_TICKS_PER_UNIT)})"
        )
    return sign * round(sum(float(n) * _TICKS_PER_UNIT[u] for n, u in parts))


def format_duration(ticks: int) -> str:
    """Return the ticks in whole units, the largest first; `parse_duration` reads them back.

    >>> format_duration(5_400_000_000)
    '1h30m'
    >>> format_duration(-1)
    '-1us'
    """
    if ticks == 0:
        return "0"
    rest, text = abs(ticks), ""
    for unit in ("d", "h", "m", "s", "ms", "us"):
        count, rest = divmod(rest, _TICKS_PER_UNIT[unit])
        text += f"{count}{unit}" if count else ""
    return ("-" if ticks < 0 else "") + text


def format_instant(ticks: int | None) -> str:
    """Return an instant as ISO 8601 in UTC.

    The ends of time are ``-inf`` and ``+inf``; None is ``none``. An instant outside the years 1 to
    9999 is shown as a number of ticks.
    """
    if ticks is None:
        return "none"
    if ticks <= TICK_MIN:
        return "-inf"
    if ticks >= TICK_MAX:
        return "+inf"
    try:
        return (
            (_TICK_ZERO_INSTANT + timedelta(microseconds=ticks)).isoformat().replace("+00:00", "Z")
        )
    except OverflowError:
        return f"{ticks} ticks"


def saturate_ticks(ticks: int) -> int:
    """Clamp to int64, as every sum of times does (semantics.md, member frontier).

    >>> saturate_ticks(TICK_MAX + 5) == TICK_MAX
    True
    """
    return max(TICK_MIN, min(TICK_MAX, ticks))


def _validate_duration(value: Any, info: ValidationInfo) -> int:
    from_yaml = bool(info.context and info.context.get("yaml"))
    if isinstance(value, int) and not isinstance(value, bool) and not from_yaml:
        return value  # the Python API counts in ticks; in YAML a bare number is a forgotten unit
    return parse_duration(value)


def _validate_non_negative_duration(value: Any, info: ValidationInfo) -> int:
    ticks = _validate_duration(value, info)
    if ticks < 0:
        raise ValueError(f"must not be negative; got {format_duration(ticks)}")
    return ticks


_DURATION_AS_TEXT = PlainSerializer(format_duration, return_type=str, when_used="json")
_DURATION_SCHEMA = WithJsonSchema(
    {
        "type": "string",
        "description": "a duration, for example 10s, 1h30m, 250ms",
        "examples": ["10s", "1h30m"],
    }
)

Duration = Annotated[
    int, BeforeValidator(_validate_non_negative_duration), _DURATION_AS_TEXT, _DURATION_SCHEMA
]
"""Ticks >= 0; written as text in YAML and JSON, as an int of ticks in Python."""

PositiveDuration = Annotated[Duration, Field(gt=0)]
"""A duration of at least one tick."""

SignedDuration = Annotated[
    int, BeforeValidator(_validate_duration), _DURATION_AS_TEXT, _DURATION_SCHEMA
]
"""Ticks of either sign: a lag may be -1 tick for strictly increasing sources."""


def _parse_instant(value: Any) -> Any:
    if isinstance(value, str):
        value = datetime.fromisoformat(value)
    if isinstance(value, datetime):
        aware = value if value.tzinfo else value.replace(tzinfo=UTC)
        return round(aware.timestamp() * 1_000_000)
    return value


Instant = Annotated[
    int,
    BeforeValidator(_parse_instant),
    WithJsonSchema({"type": "string", "format": "date-time", "examples": ["2026-01-01T00:00:00Z"]}),
]
"""An instant in ticks; YAML writes ISO 8601 text, in UTC unless it names an offset."""
