"""Which rows of a source go on, and with which columns: `where`, `select` and row rules.

Rule: docs/semantics.md, section 2, "Where, select and row rules".
"""

from __future__ import annotations

import re
from typing import Final, Literal

from tidegate.jobs.spec.event_time_options import SpecModel

FILTERED: Final = "filtered"
RULE_QUARANTINED: Final = "rule_quarantined"
RULE_DROPPED: Final = "rule_dropped"
RULE_FAILED: Final = "rule_failed"
_REASON_OF_SEVERITY: Final = {
    "quarantine": RULE_QUARANTINED,
    "drop": RULE_DROPPED,
    "fail": RULE_FAILED,
}
_CAST: Final = re.compile(
    r"\s*(?:try_)?cast\s*\((.*)\bas\s+([a-z]+(?:\(\s*\d+\s*,\s*\d+\s*\))?)\s*\)\s*",
    re.IGNORECASE | re.DOTALL,
)


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


class RowRule(SpecModel):
    """A condition that every data row of a source has to meet."""

    predicate: str
    """Condition in Spark SQL over the columns of `select`, or else of `schema`.

    A row meets the rule only if it is true; null breaks the rule.
    """
    severity: Literal["warn", "drop", "quarantine", "fail"] = "warn"
    """What happens to a row that breaks the rule.

    ``warn`` counts it and lets it go on. ``drop`` counts it and keeps it nowhere. ``quarantine``
    sends it to the dead letters. ``fail`` stops the pipeline with an error that names the row.
    """

    @property
    def removal_reason(self) -> str | None:
        """What becomes of the rows that the rule removes; None if it only warns.

        Only `RULE_QUARANTINED` is the reason of a dead letter.
        """
        return _REASON_OF_SEVERITY.get(self.severity)
