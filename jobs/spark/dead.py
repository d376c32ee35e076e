"""Dead letters: rows that cannot be taken as the schema declares them, kept as JSON text with their origin."""

from __future__ import annotations

import pyarrow.compute as pc

from tidegate.jobs.spark.cast import quote_text
from tidegate.jobs.spark.epoch import EpochContext
from tidegate.jobs.spark.write import WrittenFiles
from tidegate.jobs.spec.pipeline import DEAD_LETTERS

__all__ = ["write_dead_letters"]


def write_dead_letters(epoch: EpochContext) -> tuple[WrittenFiles, dict[str, int]]:
    """Write the dead rows of an epoch; returns them and their count per source."""
    frame = epoch.staged.frame
    if frame is None:
        return WrittenFiles((), ()), {}
    parts = epoch.staged.parts
    objects = ", ".join(quote_text(part.key) for part in parts)
    etags = ", ".join(quote_text(part.etag) for part in parts)
    rows = frame.where("_dead IS NOT NULL").selectExpr(
        "_dead AS reason",
        "_detail AS detail",
        f"array({objects})[_p] AS object",
        f"array({etags})[_p] AS etag",
        "_json AS row",
        *epoch.provenance_columns(),
    )
    written = epoch.writer.write_table(DEAD_LETTERS, epoch.collect_if_small(rows, epoch.staged.rows), None)
    table = written.read_columns(["_source"])
    counts = {} if table is None else {i["values"]: i["counts"] for i in pc.value_counts(table["_source"]).to_pylist()}
    return written, counts
