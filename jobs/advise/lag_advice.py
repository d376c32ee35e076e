"""Computes from lateness sketches the lag that a source needs, and what its present lag costs.

The price of a lag is delay: no row is released and no window closes before its source has shown a
row that is newer by `lag`. The curve of late rows over the lag shows how many rows a delay saves.
`draw_curves` draws it, one line per source, with the present lags marked.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from math import floor
from pathlib import Path
from typing import TYPE_CHECKING, Final

from tidegate.json_types import JsonObject, JsonView
from tidegate.time_units import format_duration, parse_duration

from .errors import NO_PICTURE_FORMAT, NOTHING_TO_DRAW

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# The sketches. The *disorder* of a row is the greatest event time that its partition showed before
# it, less its own, and at least 0. With a lag L the partition's frontier is the greatest time less
# L, so the row is behind it exactly if its disorder exceeds L. Lateness behind an epoch's frontier
# would depend on the lag that was set, on how epochs were cut, and on the other sources; disorder
# depends on none of them. It errs on the safe side, because an epoch judges by the frontier before
# it, and the output's frontier is the least of all sources'.
#
# Bucket 0 counts rows that are not behind, bucket i > 0 those with
# GAMMA ** (i-2) < disorder <= GAMMA ** (i-1) ticks. A quantile is the upper bound of its bucket:
# never too little, and at most 1 % too much. Sketches of different epochs, partitions and gammas
# can be added.

GAMMA: Final = 1.01
"""Ratio of neighbouring bounds.

A day of microseconds takes 2,500 buckets, of which a real source fills a few hundred.
"""


def bucket_upper_bound(bucket: int, gamma: float = GAMMA) -> int:
    """Return the greatest disorder that a bucket counts, in ticks.

    >>> bucket_upper_bound(0), bucket_upper_bound(1), bucket_upper_bound(1801)
    (0, 1, 60044441)
    """
    return 0 if bucket <= 0 else floor(gamma ** (bucket - 1))


def merge_sketches(sketches: Iterable[JsonView]) -> dict[int, int]:
    """Add up sketches of manifests; return greatest disorder of a bucket -> rows, ascending."""
    rows: dict[int, int] = {}
    for sketch in sketches:
        for bucket, count in sketch["buckets"].items():
            upper = bucket_upper_bound(int(bucket), float(sketch["gamma"]))
            rows[upper] = rows.get(upper, 0) + int(count)
    return dict(sorted(rows.items()))


TARGET_SHARES: Final = (Fraction(1, 100), Fraction(1, 1_000), Fraction(1, 10_000))
"""Shares of late rows that people ask for: 1 %, 0.1 %, 0.01 %."""


class LatenessCurve:
    """Late rows over lag, of one source.

    Args:
        rows: greatest disorder of a bucket -> rows in it, as `merge_sketches` gives it.

    Attributes:
        rows: how many rows the sketches hold; large epochs are sampled.
    """

    def __init__(self, rows: Mapping[int, int]) -> None:
        self.rows = late = sum(rows.values())
        # For lag 0 and for each bucket.
        self._late_rows: dict[int, int] = {}
        for disorder, count in sorted({0: 0, **rows}.items()):
            late -= count
            self._late_rows[disorder] = late

    def late_rows_at(self, lag: int) -> int:
        """Return how many of the sketches' rows are late at this lag (ticks), at most.

        With a negative lag all may be.
        """
        enough = (late for bound, late in self._late_rows.items() if bound <= lag)
        return min(enough, default=self.rows)

    def lag_for(self, share: Fraction) -> int | None:
        """Return the least lag, in ticks, that leaves at most this share of the rows late.

        It is 0 or the bound of a bucket. None without rows.
        """
        enough = (lag for lag, late in self._late_rows.items() if late <= share * self.rows)
        return next(enough) if self.rows else None

    def points(self) -> list[tuple[int, float]]:
        """Return (lag in ticks, share of late rows) for each bucket with rows in it, and for lag 0.

        Lags ascend; empty without rows.
        """
        rows = self.rows
        return [(lag, late / rows) for lag, late in self._late_rows.items()] if rows else []


@dataclass(frozen=True)
class LagTarget:
    """The lag that a wanted share of late rows needs.

    Attributes:
        share: of the rows, between 0 and 1.
        lag: that lag, in ticks.
        more_delay: ticks of delay that it adds to the present lag, negative if it saves delay.
            None: the present lag is not known.
    """

    share: Fraction
    lag: int
    more_delay: int | None


@dataclass(frozen=True)
class LagAdvice:
    """What the sketches show of one source.

    Attributes:
        source: its name.
        curve: late rows over lag.
        present: the present lag in ticks, which is the delay of everything that waits for this
            source; None: not known, or the source has no lag.
        read: rows read so far; the sketch holds fewer where large epochs were sampled.
        late: rows that were late so far, as the caller of `advise_lags` counts them.
        targets: by `TARGET_SHARES`; empty without rows.
    """

    source: str
    curve: LatenessCurve
    present: int | None = None
    read: int = 0
    late: int = 0
    targets: tuple[LagTarget, ...] = ()

    @property
    def present_share(self) -> float | None:
        """The share of the rows that the present lag leaves late, at most.

        None if it is not known.
        """
        if self.present is None or not self.curve.rows:
            return None
        return self.curve.late_rows_at(self.present) / self.curve.rows

    def as_dict(self) -> JsonObject:
        """Return the JSON of the command line; times in microseconds."""
        return {
            "rows": self.curve.rows,
            "rows_read": self.read,
            "rows_late": self.late,
            "present": {
                "lag_us": self.present,
                "delay_us": self.present,
                "late_share": self.present_share,
            },
            "targets": [
                {
                    "late_share": float(t.share),
                    "lag_us": t.lag,
                    "delay_us": t.lag,
                    "more_delay_us": t.more_delay,
                }
                for t in self.targets
            ],
            "curve": [{"lag_us": lag, "late_share": share} for lag, share in self.curve.points()],
        }


def advise_lags(
    sketches: Iterable[Mapping[str, JsonView]],
    lags: Mapping[str, int | None],
    counters: Mapping[str, Mapping[str, int]],
) -> list[LagAdvice]:
    """Return advice for every source that any of the arguments names.

    Args:
        sketches: of each epoch, by source.
        lags: source -> present lag in ticks; None: it has none.
        counters: source -> "read" and "late" -> rows so far. `tidegate advise` gives as late the
            rows that were late for at least one output.
    """
    by_source: dict[str, list[JsonView]] = {name: [] for name in (*lags, *counters)}
    for epoch in sketches:
        for source, sketch in epoch.items():
            by_source.setdefault(source, []).append(sketch)
    found = []
    for source, own in by_source.items():
        curve, present = LatenessCurve(merge_sketches(own)), lags.get(source)
        targets = []
        for share in TARGET_SHARES if curve.rows else ():
            lag = curve.lag_for(share) or 0
            targets.append(LagTarget(share, lag, None if present is None else lag - present))
        read, late = (counters.get(source, {}).get(name, 0) for name in ("read", "late"))
        found.append(LagAdvice(source, curve, present, read, late, tuple(targets)))
    return found


PICTURE_SUFFIXES = (".png", ".svg")
_LAG_AXIS_LABELS = (
    "1us 10us 100us 1ms 10ms 100ms 1s 5s 10s 30s 1m 5m 15m 30m 1h 2h 4h 8h 1d 2d 7d 30d"
)
_SHARE_AXIS_LABELS = {share / 100: f"{share:g} %" for share in (100, 10, 1, 0.1, 0.01)}


def draw_curves(advice: Sequence[LagAdvice], path: Path, title: str) -> None:
    """Draw the curve of each source with rows into a picture file, which is replaced if it exists.

    Raises:
        ConfigurationError: the file's name does not end in .png or .svg, or there are no rows to
            draw.
    """
    if path.suffix not in PICTURE_SUFFIXES:
        suffixes = " or ".join(PICTURE_SUFFIXES)
        raise NO_PICTURE_FORMAT(path=path, suffixes=suffixes, stem=path.stem)
    drawn = [found for found in advice if found.curve.rows]
    if not drawn:
        raise NOTHING_TO_DRAW()
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    # A fixed salt and no date: the same sketches give the same bytes.
    with rc_context({"svg.hashsalt": "tidegate", "font.size": 10}):
        figure = Figure(figsize=(9, 5.2), layout="constrained")
        axes = figure.add_subplot()
        for found in drawn:
            _draw_source_curve(axes, found)
        _set_up_axes(axes, drawn, title)
        figure.savefig(path, dpi=130, metadata={"Date": None} if path.suffix == ".svg" else None)


def _draw_source_curve(axes: Axes, found: LagAdvice) -> None:
    points = [(lag, share) for lag, share in found.curve.points() if share > 0 and lag > 0]
    label = found.source
    if found.present is not None and found.present_share is not None:
        label += (
            f": lag {format_duration(found.present)} leaves at most {found.present_share * 100:.3g}"
            " % late"
        )
    lags, shares = zip(*points, strict=True) if points else ((), ())
    (line,) = axes.step(lags, shares, where="post", label=label)
    if found.present:
        axes.axvline(found.present, color=line.get_color(), linestyle="--", linewidth=1)
    if found.present and found.present_share:
        axes.plot([found.present], [found.present_share], "o", color=line.get_color())


def _set_up_axes(axes: Axes, drawn: Sequence[LagAdvice], title: str) -> None:
    lags = [
        lag
        for found in drawn
        for lag in (*(lag for lag, _ in found.curve.points()), found.present or 0)
        if lag > 0
    ] or [1]
    low, high = max(1.0, min(lags) / 1.5), max(lags) * 1.5
    axes.set(
        xscale="log",
        yscale="log",
        xlim=(low, high),
        title=title,
        xlabel="lag (what everything waits for)",
        ylabel="late rows",
    )
    marks = {parse_duration(text): text for text in _LAG_AXIS_LABELS.split()}
    shown = {mark: text for mark, text in marks.items() if low <= mark <= high}
    axes.set_xticks(list(shown), list(shown.values()))
    axes.set_yticks(list(_SHARE_AXIS_LABELS), list(_SHARE_AXIS_LABELS.values()))
    axes.minorticks_off()
    axes.set_ylim(2e-5, 1.3)
    axes.grid(visible=True, linewidth=0.4, color="#cccccc")
    axes.legend(frameon=False)
