"""The lateness sketch.

How far rows stand behind the newest row before them, counted in buckets of equal ratio.

What is measured. A row's *disorder* is the greatest event time that its own partition showed before
it, less its own event time, or 0 if that is negative. It is what a lag is for: with a lag L the
partition's frontier stands at the greatest time less L, so the row is behind it exactly when its
disorder is greater than L. Lateness behind the frontier of an epoch would not do: it hangs on the
lag that happened to be set, on how the rows were cut into epochs and on the other sources. Disorder
depends on none of these, and errs on the safe side: an epoch judges by the frontier *before* it,
and the output's frontier is the least of the sources' (idle ones apart), so what really is late is
at most what the disorder says.

How. Bucket 0 counts rows that are not behind; bucket i > 0 counts those with GAMMA ** (i-2) <
disorder <= GAMMA ** (i-1) ticks. A quantile answers with the upper bound of its bucket: never too
little, and at most 1 % too much. Sketches of different epochs, partitions and gammas add up.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from math import ceil, floor, log
from typing import Any, Final

GAMMA: Final = 1.01
"""Ratio of neighbouring bounds.

A day of microseconds takes 2,500 buckets, of which a real source fills a few hundred.
"""


def bucket_of(disorder: int, gamma: float = GAMMA) -> int:
    """The bucket of a row so many ticks behind.

    >>> bucket_of(0), bucket_of(1), bucket_of(60_000_000)
    (0, 1, 1801)
    """
    return 0 if disorder <= 0 else ceil(log(disorder) / log(gamma)) + 1


def bucket_upper_bound(bucket: int, gamma: float = GAMMA) -> int:
    """The greatest disorder that a bucket counts.

    >>> 60_000_000 <= bucket_upper_bound(bucket_of(60_000_000)) <= 60_600_000
    True
    """
    return 0 if bucket <= 0 else floor(gamma ** (bucket - 1))


def merge_sketches(sketches: Iterable[Mapping[str, Any]]) -> dict[int, int]:
    """Several sketches as they stand in manifests, added up.

    Greatest disorder of a bucket -> rows, ascending.
    """
    rows: dict[int, int] = {}
    for sketch in sketches:
        for bucket, count in sketch["buckets"].items():
            upper = bucket_upper_bound(int(bucket), float(sketch["gamma"]))
            rows[upper] = rows.get(upper, 0) + int(count)
    return dict(sorted(rows.items()))
