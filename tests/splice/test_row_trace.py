"""When a row was read: only what the log still knows."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from tidegate.jobs.splice.row_trace import _RowTracer


@pytest.mark.parametrize(("seq", "read"), [(15, None), (25, None), (35, 4), (45, 5), (50, None)])
def test_no_epoch_has_read_the_rows_of_a_retired_one(seq: int, read: int | None) -> None:
    """Not the first that is kept, nor a pinned one before it; nor rows that are not read yet."""
    tracer: Any = object.__new__(_RowTracer)
    # Each reads ten rows; the second and third are retired.
    epochs = {
        slot: SimpleNamespace(id=slot, cut={"a/0": {"start": slot * 10 - 10, "end": slot * 10}})
        for slot in (1, 4, 5)
    }
    tracer._tables = SimpleNamespace(head=SimpleNamespace(slot=5), find_epoch=epochs.get)
    found = tracer._find_read_epoch(("a", "0", seq))
    assert (found and found.id) == read
