"""A physical value as the declared type, one value at a time.

The rule is `tidegate.jobs.spec.row_rules`.
"""

from __future__ import annotations

import re
from decimal import Decimal, InvalidOperation
from typing import Any

import pyarrow as pa

from tests.oracle.tables import from_arrow
from tidegate.jobs.engine.arrow_tables import to_arrow_type
from tidegate.jobs.spec.row_rules import EXACT_BITS, accepts_family, build_text_pattern


def family_of(kind: Any) -> str:
    """The family of a physical type, as `accepts_family` names it."""
    types = pa.types
    tests = {
        "bool": types.is_boolean,
        "int": types.is_integer,
        "float": types.is_floating,
        "decimal": types.is_decimal,
        "date": types.is_date,
        "timestamp": types.is_timestamp,
    }
    if types.is_string(kind) or types.is_large_string(kind) or types.is_string_view(kind):
        return "string"
    if types.is_binary(kind) or types.is_large_binary(kind):
        return "binary"
    return next((family for family, test in tests.items() if test(kind)), "other")


def fitted(value: Any, kind: Any, declared: str) -> Any:
    """The value as the declared type.

    Args:
        value: as Python has it; not None.
        kind: its physical Arrow type.
        declared: the column's type in the spec.

    Raises:
        ValueError: it does not fit.
    """
    family, target = family_of(kind), to_arrow_type(declared)
    form = build_text_pattern(declared) if family == "string" else None
    if not accepts_family(declared, family) or (
        form is not None and re.fullmatch(form, value) is None
    ):
        raise ValueError(f"{value!r} is no {declared}")
    if family == "int" and declared in EXACT_BITS and abs(value) > 2 ** EXACT_BITS[declared]:
        raise ValueError(f"{value} is not exact in a {declared}")
    if pa.types.is_decimal(target):
        return _decimal(value, kind, target)
    return from_arrow(pa.chunked_array([pa.array([value], kind).cast(target)]))[
        0
    ]  # ArrowInvalid is a ValueError


def _decimal(value: Any, kind: Any, target: Any) -> Decimal:
    # A float is taken as the shortest text that means it, as everyone reads it.
    text = (
        str(pa.scalar(value, kind).cast(pa.string()).as_py())
        if isinstance(value, float)
        else str(value)
    )
    exact = Decimal(text)
    try:
        found: Decimal = pa.scalar(exact.quantize(Decimal(1).scaleb(-target.scale)), target).as_py()
    except InvalidOperation as error:  # no number at all, or one with more digits than any column
        raise ValueError(f"{value} is no {target}") from error
    if found != exact:
        raise ValueError(f"{value} has more digits than the column")
    return found
