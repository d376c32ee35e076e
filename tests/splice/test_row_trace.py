"""Where a row is, and when it was read: only what the log still knows."""

from __future__ import annotations

import gc
import weakref
from types import SimpleNamespace
from typing import Any

import pytest
from tests.engine.harness import row
from tests.splice.worlds import play, world

from tidegate.jobs.spec.pipeline import EVENTS
from tidegate.jobs.splice.request_creation import (
    RequestOptions,
    RowRepair,
    create_from_dead_letters,
)
from tidegate.jobs.splice.row_trace import _RowTracer, trace_rows
from tidegate.jobs.splice.stream_history import StreamHistory
from tidegate.jobs.splice.tables_at_head import TablesAtHead


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


def test_the_request_of_a_corrected_dead_letter_is_found_by_its_old_values() -> None:
    """The request has the corrected value, and the dead letter the one that is looked for."""
    bench = world(["fixed"])
    dead = {"t": None, "v": 77, "kind": "data", "n": None}
    play(bench, [{"a": [row(1), dead], "b": [row(1)]}, {"a": [row(30)], "b": [row(30)]}])
    mend = RowRepair({"t": "1970-01-01T00:00:02Z", "v": "7"}, {})
    request = create_from_dead_letters(bench.spec, bench.log, mend, RequestOptions("ann"))
    (found,) = trace_rows(bench.spec, bench.log, {"v": "77"})
    assert [place.output for place in found.places] == ["dead_letters", "request"]
    assert found.places[1].detail["request"] == request.id


def test_what_was_read_is_freed_at_once() -> None:
    """A cycle of references waits for a collection, which the bytes of Arrow do not start."""
    bench = world(["fixed"])
    play(bench, [{"a": [row(1)], "b": [row(1)]}])
    tables = TablesAtHead(bench.spec, bench.log)
    tables.find_epoch(1)
    tables.read_rows(EVENTS)
    history = StreamHistory(tables)
    freed: list[Any] = [weakref.ref(tables), weakref.ref(history)]
    gc.disable()
    try:
        del tables, history
        assert [one() for one in freed] == [None, None]
    finally:
        gc.enable()
