"""Columns that Parquet allows, with values that no table holds."""

from __future__ import annotations

import pyarrow as pa


def text_of(*values: bytes | None) -> pa.Array:
    """Bytes that say they are text, as some writers of Parquet leave them."""
    raw = pa.array(values, pa.binary())
    return pa.Array.from_buffers(pa.string(), len(raw), raw.buffers(), raw.null_count)
