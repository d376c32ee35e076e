"""Compare results that were computed twice, by different engines or in different orders."""

from __future__ import annotations

import math
from typing import Any, Final

FLOAT_TOLERANCE: Final = 1e-9
"""Relative tolerance of doubles, absolute below 1: a sum of doubles depends on its order."""


def values_differ(left: Any, right: Any) -> bool:
    """Return whether two values differ; doubles, also in lists, may differ by rounding.

    >>> values_differ([1.0, float("nan")], [1.0 + 1e-12, float("nan")])
    False
    >>> values_differ(None, 0.0)
    True
    """
    if isinstance(left, float) and isinstance(right, float):
        if math.isnan(left) or math.isnan(right):
            return math.isnan(left) != math.isnan(right)
        return not math.isclose(left, right, rel_tol=FLOAT_TOLERANCE, abs_tol=FLOAT_TOLERANCE)
    if isinstance(left, list) and isinstance(right, list):
        return len(left) != len(right) or any(map(values_differ, left, right))
    return bool(left != right)
