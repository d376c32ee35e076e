"""Texts as values of the declared types, one at a time: those that Arrow does not convert.

JSON, Protobuf, keys and headers give texts. A text fits if nothing of it is lost; blanks around it
are no part of it.
"""

import base64
import re
from collections.abc import Callable
from datetime import UTC, date, datetime, timedelta
from decimal import ROUND_HALF_UP, Context, Decimal, InvalidOperation
from functools import partial
from typing import Any, Final
from zoneinfo import ZoneInfo

import numpy as np

from tidegate.jobs.rules.declared_values import TICKS_PER_UNIT
from tidegate.jobs.spec.pipeline import SourceSpec

TICKS_PER_SECOND: Final = 1_000_000
TICKS_PER_DAY: Final = 86_400 * TICKS_PER_SECOND
_BLANKS: Final = "".join(map(chr, range(0x21))) + "\x7f"
_WHOLE_NUMBER: Final = re.compile(r"[ \t-\r]*([+-]?[0-9]+)[ \t-\r]*")
_DECIMAL: Final = re.compile(r"[+-]?(\d+(\.\d*)?|\.\d+)([eE][+-]?\d{1,9})?")
_DOUBLE: Final = re.compile(r"([+-]?([0-9]+(\.[0-9]*)?|\.[0-9]+)([eE][+-]?[0-9]+)?)[fFdD]?")
_NO_NUMBER: Final = re.compile(r"[+-]?inf(inity)?|[+-]?nan", re.IGNORECASE)
_BASE64: Final = re.compile(r"[A-Za-z0-9+/]*={0,2}")
_DATE: Final = re.compile(
    r"(?P<year>[+-]?[0-9]{4,7})(-(?P<month>[0-9]{1,2})(-(?P<day>[0-9]{1,2})([T ].*)?)?)?", re.DOTALL
)
_TIME: Final = re.compile(
    r"(?P<year>[+-]?[0-9]{4,6})(-(?P<month>[0-9]{1,2})(-(?P<day>[0-9]{1,2})"
    r"([T ](?P<hour>[0-9]{1,2})(:(?P<minute>[0-9]{1,2})(:(?P<second>[0-9]{1,2})"
    r"(\.(?P<fraction>[0-9]*))?"
    r"(?P<zone>[ ]*(Z|(UTC|GMT|UT)?(?P<sign>[+-])(?P<hours>[0-9]{2})(:?(?P<minutes>[0-9]{2}))?))?"
    r")?)?)?)?)?"
)
_HAS_ZONE: Final = re.compile(r"[Zz]\Z|[T ].*[+-][0-9]{2}(:?[0-9]{2})?\Z")
_MOST_ZONE: Final = 18 * 60
_MOST_DIGITS: Final = 38
_LONGEST_NUMBER: Final = 19
_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
_BOUNDS: Final = {
    "int": 1 << 31,
    "long": 1 << 63,
}
_BOOLEANS: Final = {
    **dict.fromkeys(("t", "true", "y", "yes", "1"), True),
    **dict.fromkeys(("f", "false", "n", "no", "0"), False),
}


def cast_text(text: str, declared: str, source: SourceSpec) -> Any:
    """Return a text as a value of a declared type; None if it does not fit.

    Times are ticks, and dates are days since 1970.
    """
    if declared == "string":
        return text
    if declared == "timestamp":
        return _cast_time(text, source)
    if declared.startswith("decimal"):
        found = parse_decimal(text)
        return None if found is None else _cast_decimal(found, declared)
    return _CASTS[declared](text)


def check_whole_number(number: int, declared: str) -> int | None:
    """Return a number as an `int` or `long`; None if it is too large."""
    bound = _BOUNDS[declared]
    return number if -bound <= number < bound else None


def parse_decimal(text: str) -> Decimal | None:
    """Return a number with all its digits; None if the text is none."""
    own = text.strip(_BLANKS)
    return Decimal(own) if _DECIMAL.fullmatch(own) else None


def round_decimal(number: Decimal, precision: int, scale: int) -> Decimal | None:
    """Return the nearest number of these digits; None if it has more before the point."""
    try:
        context = Context(prec=precision, rounding=ROUND_HALF_UP)
        return number.quantize(Decimal((0, (1,), -scale)), context=context)
    except InvalidOperation:
        return None


def read_decimal_digits(declared: str) -> tuple[int, int]:
    """Return precision and scale of a declared decimal."""
    precision, scale = map(int, re.findall(r"\d+", declared))
    return precision, scale


def _cast_decimal(number: Decimal, declared: str) -> Decimal | None:
    precision, scale = read_decimal_digits(declared)
    found = round_decimal(number, precision, scale)
    # Digits beyond the widest of decimals are left out, as those of a double are.
    whole = round_decimal(number, _MOST_DIGITS, _MOST_DIGITS - precision + scale)
    return found if found == whole else None


def to_float32(number: float) -> Any:
    """Return the nearest `float`, which may be an infinity."""
    with np.errstate(over="ignore"):
        return np.float32(number)


def _cast_whole_number(text: str, declared: str) -> int | None:
    found = _WHOLE_NUMBER.fullmatch(text)
    if found is None:
        return None
    digits = found[1].lstrip("+-0") or "0"
    if len(digits) > _LONGEST_NUMBER:  # Python refuses to read thousands of digits
        return None
    number = int(digits)
    return check_whole_number(-number if found[1].startswith("-") else number, declared)


def _cast_double(text: str) -> float | None:
    own = text.strip(_BLANKS)
    if found := _DOUBLE.fullmatch(own):
        return float(found[1])
    return float(own) if _NO_NUMBER.fullmatch(own) else None


def _cast_float(text: str) -> Any:
    found = _cast_double(text)
    return None if found is None else to_float32(found)


def _cast_boolean(text: str) -> bool | None:
    return _BOOLEANS.get(text.strip(_BLANKS).lower())


def _cast_base64(text: str) -> bytes | None:
    own = re.sub(r"\s", "", text, flags=re.ASCII)
    digits = own.rstrip("=")
    if not _BASE64.fullmatch(own) or len(digits) % 4 == 1 or ("=" in own and len(own) % 4):
        return None
    return base64.b64decode(digits + "=" * (-len(digits) % 4))


def _cast_date(text: str) -> int | None:
    found = _DATE.fullmatch(text.strip(_BLANKS))
    days = None if found is None else _count_days(found)
    return None if days is None else check_whole_number(days, "int")


def _count_days(found: re.Match[str]) -> int | None:
    month, day = (int(found[name] or 1) for name in ("month", "day"))
    year = int(found["year"])
    if not 1 <= month <= 12:
        return None
    if 1 <= year <= 9999 and 1 <= day <= 28:  # for speed: days that each month has
        return date(year, month, day).toordinal() - _EPOCH.toordinal()
    first = np.datetime64(year - 1970, "Y").astype("datetime64[M]") + (month - 1)
    begin, end = (one.astype("datetime64[D]").astype(int) for one in (first, first + 1))
    return int(begin) + day - 1 if 1 <= day <= end - begin else None


def _cast_time(text: str, source: SourceSpec) -> int | None:
    if source.parse.timestamps != "iso":
        return _cast_number_of_units(text, TICKS_PER_UNIT[source.parse.timestamps])
    own = text.strip(_BLANKS)
    found = _TIME.fullmatch(own)
    # A sign counts only behind a time of day: the end of a plain date is not a zone.
    is_zoned = _HAS_ZONE.search(own) is not None
    if found is None or is_zoned != (found["zone"] is not None):
        return None
    ticks = _count_ticks(found)
    if ticks is None or is_zoned:
        return ticks
    return None if source.timezone is None else find_instant(ticks, source.timezone)


def _cast_number_of_units(text: str, per_unit: int) -> int | None:
    number = parse_decimal(text)
    number = None if number is None else round_decimal(number, 30, 6)
    if number is None:
        return None
    ticks = Context(prec=60).multiply(number, per_unit)
    return check_whole_number(int(ticks.to_integral_value(ROUND_HALF_UP)), "long")


def _count_ticks(found: re.Match[str]) -> int | None:
    hour, minute, second = (int(found[name] or 0) for name in ("hour", "minute", "second"))
    hours, minutes = (int(found[name] or 0) for name in ("hours", "minutes"))
    days, zone = _count_days(found), 60 * hours + minutes
    if days is None or hour > 23 or max(minute, second, minutes) > 59 or zone > _MOST_ZONE:
        return None
    zone = -zone if found["sign"] == "-" else zone
    seconds = 60 * (60 * hour + minute - zone) + second
    fraction = int((found["fraction"] or "")[:6].ljust(6, "0"))
    ticks = days * TICKS_PER_DAY + seconds * TICKS_PER_SECOND + fraction
    return check_whole_number(ticks, "long")


def find_instant(local: int, timezone: str) -> int | None:
    """Return the earlier instant of a local time in ticks; None if the zone skips it."""
    try:
        there = (_EPOCH + timedelta(microseconds=local)).replace(tzinfo=ZoneInfo(timezone))
        instant = there.astimezone(UTC)
        back = instant.astimezone(there.tzinfo)
    except OverflowError:
        return None
    if back.replace(tzinfo=None) != there.replace(tzinfo=None):
        return None
    return (instant - _EPOCH) // timedelta(microseconds=1)


_CASTS: Final[dict[str, Callable[[str], Any]]] = {
    "int": partial(_cast_whole_number, declared="int"),
    "long": partial(_cast_whole_number, declared="long"),
    "float": _cast_float,
    "double": _cast_double,
    "boolean": _cast_boolean,
    "date": _cast_date,
    "binary": _cast_base64,
}
