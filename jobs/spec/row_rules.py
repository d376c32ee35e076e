"""What becomes of a row because of its values: names of the outcomes, casts, and values that fit.

Every mover applies this one rule (docs/semantics.md, "Never silent"). A value fits if it becomes
the declared type without losing information: 1.5 does not fit an int, 0.125 does not fit a
decimal(6,2), 2**60 + 1 does not fit a double. A value that does not fit is a bad value, and its row
is a dead letter. Text is accepted only in one common form, so that the result does not depend on
how lenient an engine is.
"""

import re
from typing import Final

from tidegate.json_types import read_data_file

# What `where` and row rules of a source do (docs/semantics.md, section 2).
FILTERED: Final = "filtered"
RULE_QUARANTINED: Final = "rule_quarantined"
RULE_DROPPED: Final = "rule_dropped"
RULE_FAILED: Final = "rule_failed"
_CAST = re.compile(
    r"\s*(?:try_)?cast\s*\((.*)\bas\s+([a-z]+(?:\(\s*\d+\s*,\s*\d+\s*\))?)\s*\)\s*",
    re.IGNORECASE | re.DOTALL,
)

EXACT_BITS: Final = {"float": 24, "double": 53}
"""Integers up to two to this power are exact in a floating type; larger ones do not fit."""

_RULES = read_data_file(__package__, "row_rules.toml")


def read_cast_type(expression: str) -> str | None:
    """Return the type that an expression is cast to as a whole; None if it is not a cast.

    >>> read_cast_type("try_cast(a || ')' as bigint)"), read_cast_type("cast(a as int) + 1")
    ('long', None)
    """
    match = _CAST.fullmatch(expression)
    if match is None:
        return None
    depth = 0
    for sign in re.sub(r"'(?:[^'\\]|\\.)*'", "", match[1]):
        depth += (sign == "(") - (sign == ")")
        if depth < 0:  # two casts, such as a sum of them
            return None
    kind = match[2].lower()
    return {"bigint": "long", "integer": "int"}.get(kind, kind)


def accepts_family(declared: str, family: str) -> bool:
    """Return whether some value of a physical type family can fit the declared type.

    Families are bool, int, float, decimal, string, date, timestamp and binary.

    >>> accepts_family("decimal(6,2)", "int"), accepts_family("date", "int")
    (True, False)
    """
    return family in _RULES["families"].get(declared.partition("(")[0], ())


def build_text_pattern(declared: str) -> str | None:
    """Return the regular expression that a whole text must match to be read as the declared type.

    None means that no pattern decides: `string` takes every text; for `binary` and `timestamp` the
    caller has rules of its own.

    >>> build_text_pattern("decimal(6,2)"), build_text_pattern("string")
    ('-?[0-9]+([.][0-9]{1,2})?', None)
    """
    texts: dict[str, str] = _RULES["texts"]
    if declared.startswith("decimal"):
        scale = int(re.findall(r"\d+", declared)[1])
        return texts["int"] + (f"([.][0-9]{{1,{scale}}})?" if scale else "")
    return texts.get(declared)
