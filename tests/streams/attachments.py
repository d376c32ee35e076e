"""Drawn attachments of streams, as a pipeline's spec and as the model has them."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st

from tests.oracle import stream_model
from tests.oracle.stream_model import MergeMode
from tests.streams import folds
from tests.streams.support import streams_spec

V = {"schema": {"t": "timestamp", "v": "long"}}
EDGES = [("events", "a"), ("a", "b"), ("events", "b"), ("a", "c"), ("b", "c")]
FOLDS = {"running": folds.running, "totals": folds.totals}
attachments = st.lists(
    st.tuples(
        st.sampled_from(EDGES),
        st.sampled_from(["running", "totals", "pipe"]),
        st.booleans(),
        st.sampled_from(MergeMode),
    ),
    min_size=1,
    max_size=4,
)


def spec_of(drawn: list[Any], chunk: int) -> Any:
    """The pipeline; every attachment waits to be asked for."""
    pipes, reducers = {}, {}
    for number, ((origin, to), kind, inherit, merge) in enumerate(drawn):
        common = {
            "from": origin,
            "to": to,
            "inherit": inherit,
            "merge": str(merge),
            "attach": "on_request",
            "rows_per_epoch": chunk,
        }
        if kind == "pipe":
            pipes[f"n{number}"] = {**common, "where": "v % 4 <> 0", "positions": [1, 9]}
        else:
            keys = ["v"] if kind == "totals" else []
            reducers[f"n{number}"] = {
                **common,
                "function": f"tests.streams.folds:{kind}",
                "initial": 0,
                "keys": keys,
            }
    return streams_spec(
        streams={"a": V, "b": V, "c": {**V, "buffer": True}}, pipes=pipes, reducers=reducers
    )


def attachment(number: int, drawn: tuple[Any, ...]) -> stream_model.Attachment:
    """The same for the model."""
    (origin, to), kind, inherit, merge = drawn
    if kind == "pipe":
        return stream_model.pipe(
            f"n{number}",
            origin,
            to,
            positions=(1, 9),
            where=lambda v: v["v"] % 4 != 0,
            inherit=inherit,
            merge=merge,
        )
    key = (lambda v: v["v"]) if kind == "totals" else None
    return stream_model.Attachment(f"n{number}", origin, (to,), FOLDS[kind], 0, inherit, merge, key)
