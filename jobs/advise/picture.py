"""The advisor's curve as a picture: late rows over lag, one line per source, the present lags marked."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final

from tidegate.jobs.advise.advice import LagAdvice
from tidegate.jobs.spec.errors import ConfigurationError
from tidegate.jobs.spec.time import format_duration, parse_duration

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["PICTURE_SUFFIXES", "draw_curves"]

PICTURE_SUFFIXES: Final = (".png", ".svg")
_COLOURS: Final = ("#1f77b4", "#d95f02", "#1b9e77", "#7570b3", "#e7298a", "#66a61e", "#a6761d", "#666666")
_LAG_AXIS_LABELS: Final = (
    *("1us", "10us", "100us", "1ms", "10ms", "100ms", "1s", "5s", "10s", "30s", "1m", "5m", "15m", "30m"),
    *("1h", "2h", "4h", "8h", "1d", "2d", "7d", "30d"),
)
_SHARE_AXIS_LABELS: Final = {1.0: "100 %", 0.1: "10 %", 0.01: "1 %", 0.001: "0.1 %", 0.0001: "0.01 %"}


def draw_curves(advice: Sequence[LagAdvice], path: Path, title: str) -> None:
    """Write the picture.

    Raises:
        ConfigurationError: a file name that says neither PNG nor SVG, or no rows to draw.
    """
    if path.suffix not in PICTURE_SUFFIXES:
        raise ConfigurationError(
            f"cannot draw {path}: pictures end in {' or '.join(PICTURE_SUFFIXES)}",
            code="advise.picture",
            advice=f"--plot {path.stem}.svg",
        )
    drawn = [found for found in advice if found.curve.rows]
    if not drawn:
        raise ConfigurationError(
            "there is no lateness sketch to draw yet", code="advise.nothing", advice="let an epoch with rows be sealed"
        )
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    # A fixed salt and no date: the same sketches give the same bytes.
    with rc_context({"svg.hashsalt": "tidegate", "font.size": 10}):
        figure = Figure(figsize=(9, 5.2), layout="constrained")
        axes = figure.add_subplot()
        for place, found in enumerate(drawn):
            _draw_source_curve(axes, found, _COLOURS[place % len(_COLOURS)])
        _set_up_axes(axes, drawn, title)
        figure.savefig(path, dpi=130, metadata={"Date": None} if path.suffix == ".svg" else None)


def _draw_source_curve(axes: Axes, found: LagAdvice, colour: str) -> None:
    points = [(lag, share) for lag, share in found.curve.points() if share > 0 and lag > 0]
    label = found.source
    if found.present is not None and found.present_share is not None:
        label += f": lag {format_duration(found.present)} leaves at most {found.present_share * 100:.3g} % late"
    axes.step([lag for lag, _ in points], [share for _, share in points], where="post", color=colour, label=label)
    if found.present:
        axes.axvline(found.present, color=colour, linestyle="--", linewidth=1)
    if found.present and found.present_share:
        axes.plot([found.present], [found.present_share], "o", color=colour)


def _set_up_axes(axes: Axes, drawn: Sequence[LagAdvice], title: str) -> None:
    lags = [lag for found in drawn for lag in (*(lag for lag, _ in found.curve.points()), found.present or 0) if lag > 0] or [1]
    low, high = max(1.0, min(lags) / 1.5), max(lags) * 1.5
    axes.set(
        xscale="log", yscale="log", xlim=(low, high), title=title, xlabel="lag (what everything waits for)", ylabel="late rows"
    )
    marks = {parse_duration(text): text for text in _LAG_AXIS_LABELS}
    shown = {mark: text for mark, text in marks.items() if low <= mark <= high}
    axes.set_xticks(list(shown), list(shown.values()))
    axes.set_yticks(list(_SHARE_AXIS_LABELS), list(_SHARE_AXIS_LABELS.values()))
    axes.minorticks_off()
    axes.set_ylim(2e-5, 1.3)
    axes.grid(visible=True, linewidth=0.4, color="#cccccc")
    axes.legend(frameon=False)
