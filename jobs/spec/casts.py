"""Which physical values fit a declared column: one rule for every mover (semantics.md section 2, "never silent").

A value fits when it becomes the declared type without losing anything a person would miss: 1.5 is no int, 0.125 no
decimal(6,2), 2 to the 60th plus one no double. What does not fit is a bad value, and its row a dead letter. Text is taken only
in the one form that everybody writes, so that no engine's leniency decides what a row means.
"""

from __future__ import annotations

import re
from typing import Final

__all__ = ["EXACT_BITS", "accepts", "text_form"]

EXACT_BITS: Final = {"float": 24, "double": 53}
"""Integers up to two to this power are exact in a floating type; larger ones do not fit."""

_NUMBERS: Final = frozenset({"bool", "int", "float", "decimal", "string"})
_ACCEPTS: Final = {
    "string": frozenset({"bool", "int", "decimal", "date", "string"}),  # floats and times have no one text
    "boolean": frozenset({"bool", "int", "float", "string"}),
    "int": _NUMBERS,
    "long": _NUMBERS,
    "float": _NUMBERS,
    "double": _NUMBERS,
    "decimal": _NUMBERS - {"bool"},
    "date": frozenset({"date", "timestamp", "string"}),
    "binary": frozenset({"binary", "string"}),
    "timestamp": frozenset({"timestamp"}),  # a number has no unit, and a text no agreed zone
}
_INTEGER: Final = r"-?[0-9]+"
_REAL: Final = r"[+-]?([0-9]+[.]?[0-9]*|[.][0-9]+)([eE][+-]?[0-9]+)?"
_FORMS: Final = {
    "boolean": r"[tT][rR][uU][eE]|[fF][aA][lL][sS][eE]|0|1",
    "int": _INTEGER,
    "long": _INTEGER,
    "float": _REAL,
    "double": _REAL,
    "date": r"[0-9]{4}-[0-9]{2}-[0-9]{2}",
}


def accepts(declared: str, family: str) -> bool:
    """Whether any value of a physical family (bool, int, float, decimal, string, date, timestamp, binary) may fit.

    >>> accepts("decimal(6,2)", "int"), accepts("date", "int")
    (True, False)
    """
    return family in _ACCEPTS[declared.partition("(")[0]]


def text_form(declared: str) -> str | None:
    """The regular expression that a whole text must match to be taken as the declared type; None: any text will do.

    >>> text_form("decimal(6,2)"), text_form("string")
    ('-?[0-9]+([.][0-9]{1,2})?', None)
    """
    if declared.startswith("decimal"):
        scale = int(re.findall(r"\d+", declared)[1])
        return _INTEGER + (f"([.][0-9]{{1,{scale}}})?" if scale else "")
    return _FORMS.get(declared)
