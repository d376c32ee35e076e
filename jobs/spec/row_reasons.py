"""Every reason for which a row can be late or a dead letter.

What stands in the tables' `reason` column.
"""

from __future__ import annotations

from typing import Literal

LateReason = Literal[
    "late_order",
    "late_window",
    "rejected",
    "max_jump",
    "cti_violation",
    "flagged",  # the row is also among the events
]

DeadLetterReason = Literal[
    "not_parquet",
    "truncated",
    "empty_object",
    "unknown_column",
    "missing_column",
    "changed_object",
    "table_rewritten",
    "missing_offsets",
    "bad_value",
    "no_event_time",
    "before_min_event_time",
    "naive_time",
]
