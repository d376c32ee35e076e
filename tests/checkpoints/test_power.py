"""The local store through a power cut at any flush.

What was acknowledged is there, and nothing is torn.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.checkpoints.power import Disk, Skip
from tests.engine.harness import Bench, row, spec_of

from tidegate.checkpoints.local_store import LocalStore
from tidegate.checkpoints.verify import CheckpointVerdict, verify_checkpoint
from tidegate.errors import TidegateError

EPOCHS = 3


def drive(bench: Bench, acknowledged: list[str]) -> None:
    """Epochs one after the other; ids of those that were reported sealed."""
    engine = bench.engine()
    for _ in range(EPOCHS):
        sealed = engine.run_epoch().sealed
        if sealed:
            acknowledged.append(str(sealed))


def bench_on(root: Path) -> Bench:
    """The same rows each time, one object's worth per epoch."""
    bench = Bench(spec_of(sources=_limited()), LocalStore(root))
    bench.sources["a"].append(*[row(10 * n + 1, n) for n in range(EPOCHS)])
    bench.sources["b"].append(*[row(10 * n + 2, n) for n in range(EPOCHS)])
    return bench


def _limited() -> dict[str, object]:
    raw = spec_of().model_dump(mode="json", by_alias=True)["sources"]
    return {name: source | {"limits": {"rows": 1}} for name, source in raw.items()}


def broken(tmp_path: Path, cut: int, seed: int, skip: Skip = "") -> str | None:
    """Cut the power, look at what is left, and go on from there: what is wrong, or None."""
    root = tmp_path / f"{cut}-{seed}"
    bench = bench_on(root / "before")
    disk, acknowledged = Disk(root / "before", cut, skip), list[str]()
    with disk.watched():
        drive(bench, acknowledged)
    after = bench_on(disk.after(root / "after", seed))
    try:
        there = [str(epoch.id) for epoch in after.epochs()]
        if there[: len(acknowledged)] != acknowledged:
            return f"{acknowledged} were acknowledged, {there} are there"
        found = [verify_checkpoint(after.log, epoch.id).verdict for epoch in after.epochs()]
        if set(found) - {CheckpointVerdict.HEALTHY}:
            return f"damaged: {found}"
        drive(after, [])
    except TidegateError as error:
        return str(error)
    read = after.epochs()[-1].counters.read
    return None if read == 2 * EPOCHS else f"{read} rows were read"


@pytest.mark.parametrize("cut", [0, 1, 2, 5, 9, 14, 20, 27, 35, 44, 54, 65, 1000])
def test_what_was_acknowledged_survives(tmp_path: Path, cut: int) -> None:
    """Cut at this flush; what is left verifies, and a new driver reads every row once."""
    for seed in range(2):
        assert broken(tmp_path, cut, seed) is None


@pytest.mark.parametrize("skip", ["content", "folders"])
def test_every_flush_is_needed(tmp_path: Path, skip: Skip) -> None:
    """Without the flushes of contents, or of folders, some cut loses or tears what was
    acknowledged.
    """
    assert any(broken(tmp_path, cut, seed, skip) for cut in (20, 44, 1000) for seed in range(4))
