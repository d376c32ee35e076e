"""Row rules of a source: conditions that its data rows have to meet.

Rule: docs/semantics.md, section 2, "Row rules".
"""

from __future__ import annotations

from typing import Final, Literal

from tidegate.jobs.spec.event_time_options import SpecModel

RULE_QUARANTINED: Final = "rule_quarantined"
RULE_DROPPED: Final = "rule_dropped"
RULE_FAILED: Final = "rule_failed"
_REASON_OF_SEVERITY: Final = {
    "quarantine": RULE_QUARANTINED,
    "drop": RULE_DROPPED,
    "fail": RULE_FAILED,
}


class RowRule(SpecModel):
    """A condition that every data row of a source has to meet."""

    predicate: str
    """Condition in Spark SQL over the columns of `schema`.

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
