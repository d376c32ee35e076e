"""Edge events: rows that begin and end something that lasts (semantics.md section 1, shapes; section 4.3)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Annotated

from pydantic import AfterValidator, Field

from tidegate.jobs.spec.options import LatePolicy, SpecModel, OrderOptions, PunctuationOptions
from tidegate.jobs.spec.windows import WindowKind, WindowSpec

__all__ = ["EdgeColumns", "list_edge_conflicts"]


class EdgeColumns(SpecModel):
    """Which rows of a source are edges, and which start and end belong together.

    A start edge opens: it counts from its event time on in every window that closes, without an end, until the first end edge of
    its keys behind it in its partition closes it, at that row's event time. A row of any other kind is an ordinary row.
    """

    kind: str
    """Column that tells start edges from end edges."""
    start: str = "start"
    end: str = "end"
    keys: Annotated[tuple[str, ...], Field(min_length=1), AfterValidator(lambda keys: tuple(dict.fromkeys(keys)))]
    """Columns that a start and its end have in common."""

    def named_columns(self, schema: Mapping[str, str]) -> dict[str, str]:
        """The columns that are named here, by field.

        Raises:
            ValueError: what tells starts from ends is no text.
        """
        if schema.get(self.kind, "string") != "string":
            raise ValueError(f"edges.kind: column {self.kind!r} must be a string, not {schema[self.kind]}")
        return {"edges.kind": self.kind, **{f"edges.keys: {key}": key for key in self.keys}}


def list_edge_conflicts(
    edges: Mapping[str, EdgeColumns],
    punctuations: Mapping[str, PunctuationOptions | None],
    release: OrderOptions,
    windows: Mapping[str, WindowSpec],
) -> Iterator[str]:
    """What cannot be beside edge events, each in a sentence. `edges` are those of the sources that have any."""
    if not edges:
        return
    for name, columns in edges.items():
        if columns.start == columns.end:
            yield f"sources.{name}.edges: start and end are both {columns.start!r}"
        punctuation = punctuations[name]
        if punctuation is not None and punctuation.on_violation == "adjust":
            yield f"sources.{name}.punctuation.on_violation: an edge is not adjusted: choose error or drop"
    if release.on_late is LatePolicy.ADJUST:
        yield "release.on_late: an edge is not adjusted: choose another policy"
    for name, window in windows.items():
        yield from (f"windows.{name}: over edge events {reason}" for reason in _list_edge_window_conflicts(window))


def _list_edge_window_conflicts(window: WindowSpec) -> Iterator[str]:
    """A window tells each result once, when it closes: so a late end edge changes nothing that readers hold."""
    if window.kind is WindowKind.SESSION:
        yield "a session would never end: take a tumbling or sliding window"
    if window.lateness != 0 or window.late_unit != "event":
        yield "results are final when they are told: lateness must be 0 and late_unit event"
    if window.emit != "close" or window.fire_every is not None or window.zero_rows:
        yield "results are told when the window closes: emit must be close, without fire_every and zero_rows"
    if window.on_late is LatePolicy.ADJUST:
        yield "an edge is not adjusted: choose another on_late"
