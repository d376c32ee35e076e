"""The deep check.

Silent about what the engine seals under every late policy, and loud about what does not add up.
"""

from __future__ import annotations

import io
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pyarrow.parquet as pq
import pytest

from tests.engine.harness import Bench, barrier, row, spec_of
from tidegate.checkpoints.canonical_json import sha256_of_bytes
from tidegate.checkpoints.manifest import FileRef, Manifest
from tidegate.checkpoints.verify import ObjectProblem
from tidegate.jobs.engine.replay import make_content_check


def sealed(**fields: Any) -> Bench:
    """Epochs with released, late, buffered rows, results and a barrier."""
    bench = Bench(spec_of(**fields))
    engine = bench.engine()
    for at in (3, 30, 33, 60):
        bench.sources["a"].append(
            row(at), row(at + 2), row(at - 2), *([barrier(at + 3, 1)] if at == 33 else [])
        )
        bench.sources["b"].append(
            row(at + 1), row(max(at - 29, 0)), *([barrier(at + 3, 1)] if at == 33 else [])
        )
        engine.run_epoch()
    return bench


POLICIES = ("side_output", "drop", "emit_flagged", "adjust", "reject_to_origin")


@pytest.mark.parametrize("mode", ["ordered", "pass_through", "commit"])
@pytest.mark.parametrize("policy", POLICIES)
def test_what_is_sealed_adds_up(mode: str, policy: str) -> None:
    """Every epoch, whatever the mode and the late policy."""
    bench = sealed(release={"mode": mode, "on_late": policy})
    assert [make_content_check(bench.store)(epoch) for epoch in bench.epochs()] == [[]] * len(
        bench.epochs()
    )


@pytest.mark.parametrize("mode", ["ordered", "pass_through", "commit"])
def test_an_epoch_names_files_of_its_own_attempt_and_of_its_parent_only(mode: str) -> None:
    """The sweep relies on it: it reads only the oldest manifest of each stretch that stays."""
    bench = sealed(release={"mode": mode})
    epochs, inherited = bench.epochs(), 0
    for parent, epoch in pairwise(epochs):
        own = {file.key for file in epoch.all_files()} - {file.key for file in parent.all_files()}
        inherited += len(epoch.all_files()) - len(own)
        assert {bench.log.layout.parse_attempt(key) for key in own} <= {epoch.id}
    assert inherited > 0


def rewritten(bench: Bench, file: FileRef, change: Callable[[Any], Any]) -> FileRef:
    """The file with other rows, described as it then is, but for what the manifest says about rows
    and bounds.
    """
    rows = change(pq.read_table(io.BytesIO(bench.store.get(file.key).data)))
    buffer = io.BytesIO()
    pq.write_table(rows, buffer)
    bench.store.put(file.key, buffer.getvalue())
    return file.model_copy(
        update={"bytes": len(buffer.getvalue()), "sha256": sha256_of_bytes(buffer.getvalue())}
    )


def found(bench: Bench, manifest: Manifest) -> list[str]:
    """What the check says."""
    findings = make_content_check(bench.store)(manifest)
    assert {f.problem for f in findings} <= {ObjectProblem.CONTENT}
    return [f"{f.key.rpartition('/')[2]}: {f.detail}" for f in findings]


def test_a_row_too_few_is_found() -> None:
    """In a table and in a segment, each with its own sentence."""
    bench = sealed()
    epoch = next(e for e in reversed(bench.epochs()) if e.files.get("events"))
    file, *_ = epoch.files["events"]
    rewritten(bench, file, lambda rows: rows.slice(1))
    assert any(
        f"has {file.rows - 1:,} rows instead of {file.rows:,}" in said
        for said in found(bench, epoch)
    )


def test_uncounted_rows_are_found() -> None:
    """A file that fits its own description, but not the epoch's counters."""
    bench = sealed()
    epoch = next(e for e in reversed(bench.epochs()) if e.files.get("events"))
    own = epoch.notes["epoch"]
    more = epoch.model_copy(
        update={"notes": {**epoch.notes, "epoch": {**own, "released": own["released"] + 1}}}
    )
    assert any("but" in said and "were counted" in said for said in found(bench, more))
    without = {t: fs for t, fs in epoch.files.items() if t != "events"}
    assert found(bench, epoch.model_copy(update={"files": without})) == []


def test_a_buffer_that_lost_a_segment_is_found() -> None:
    """The rows that wait are counted again; bounds are compared."""
    bench = sealed()
    epoch = next(
        e
        for e in reversed(bench.epochs())
        if e.counters.retained and any(s.kind == "order" for s in e.segments)
    )
    without = [s for s in epoch.segments if s.kind != "order"]
    assert any(
        "waiting rows" in said
        for said in found(bench, epoch.model_copy(update={"segments": without}))
    )
    moved = [s.model_copy(update={"max_time": (s.max_time or 0) + 1}) for s in epoch.segments]
    assert any(
        "reaches from" in said
        for said in found(bench, epoch.model_copy(update={"segments": moved}))
    )


def test_garbage_is_found() -> None:
    """A file that is not a Parquet file."""
    bench = sealed()
    epoch = next(e for e in reversed(bench.epochs()) if e.segments)
    bench.store.put(epoch.segments[0].key, b"PAR1 not really")
    assert any("not a readable Parquet" in said for said in found(bench, epoch))
