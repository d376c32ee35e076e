"""docs/streams.md says what happens: its spec is valid and runs, and its examples are executed."""

from __future__ import annotations

import re
import sys
import types
from pathlib import Path
from typing import Any

import pytest

from tests.streams.support import World
from tidegate.jobs.spec.loader import parse_spec
from tidegate.jobs.spec.pipeline import PipelineSpec

PAGE = Path(__file__).parents[2] / "docs" / "streams.md"


def blocks(language: str) -> list[str]:
    """The page's code blocks in a language."""
    return re.findall(rf"```{language}\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)


def test_the_examples_hold() -> None:
    """In the order of the page, in one namespace, assertions included."""
    namespace: dict[str, Any] = {}
    for block in blocks("python"):
        exec(block, namespace)
    assert namespace["total"](1.0, {"shop": "a", "amount": 2.0}, 0) == (
        3.0,
        [{"shop": "a", "total": 3.0}],
    )


def test_the_spec_of_the_page_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its streams, pipes and reducers, on a source with its columns, give the rows one expects."""
    (text,) = blocks("yaml")
    spec = parse_spec(text)
    module = types.ModuleType("shop_rules")
    exec(blocks("python")[0], module.__dict__)
    monkeypatch.setitem(sys.modules, "shop_rules", module)
    graph = {name: getattr(spec, name) for name in ("streams", "pipes", "reducers")}
    source = {
        "path": "x/",
        "schema": {"t": "timestamp", "shop": "string", "amount": "double"},
        "event_time": "t",
        "lag": "-1us",
    }
    world = World(PipelineSpec.model_validate({"name": "p", "sources": {"a": source}, **graph}))
    rows = [{"t": n * 1_000_000, "shop": "ab"[n % 2], "amount": 90.0 + 10 * n} for n in range(6)]
    world.bench.sources["a"].append(*rows)
    world.engine.run_epoch()
    assert [row["amount"] for row in world.rows("big")] == [110.0, 120.0, 130.0, 140.0]
    for stream in ("totals", "report"):
        found = [(row["shop"], row["total"]) for row in world.rows(stream)]
        assert found == [("a", 110.0), ("b", 120.0), ("a", 240.0), ("b", 260.0)]
