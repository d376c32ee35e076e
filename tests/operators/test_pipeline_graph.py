"""The graph of a pipeline: its parts, what connects them, and how each is."""

from __future__ import annotations

from typing import Any

import pytest

from tidegate.jobs.spec.pipeline import PipelineSpec
from tidegate.operators.page_data import REQUESTS, build_graph

SOURCE = {"schema": {"at": "timestamp", "n": "long"}, "event_time": "at", "lag": "1s"}


def _spec(**more: Any) -> PipelineSpec:
    sources = {name: {**SOURCE, "path": f"inbox/{name}"} for name in ("web", "shop")}
    return PipelineSpec.model_validate({"name": "p", "sources": sources, **more})


def _edges(graph: dict[str, Any]) -> set[tuple[str, str]]:
    return {(edge["from"], edge["to"]) for edge in graph["edges"]}


def test_every_part_of_a_spec_is_in_the_graph() -> None:
    """Sources, windows, streams with their pipes and reducers, rejections, requests and sinks."""
    window = {"kind": "tumbling", "size": "1h", "aggregates": {"n": "count(*)"}}
    spec = _spec(
        windows={"hourly": window},
        streams={"big": {}, "sums": {"schema": {"total": "long"}}},
        pipes={"large": {"from": "events", "to": "big", "where": "n > 9"}},
        reducers={"add": {"from": "big", "to": "sums", "aggregates": {"total": "sum(n)"}}},
        sinks={"copy": {"kind": "files", "path": "out/", "tables": ["hourly"]}},
    )
    graph = build_graph(spec, {}, 2)
    columns = {node["id"]: node["column"] for node in graph["nodes"]}
    assert (columns["source:web"], columns["events"], columns["hourly"]) == (0, 1, 2)
    assert columns["events"] < columns["big"] < columns["sums"] < columns["rejections"]
    assert columns["sink:copy"] > max(n for name, n in columns.items() if name != "sink:copy")
    assert _edges(graph) >= {
        *(("source:web", "events"), ("source:shop", "events"), ("events", "hourly")),
        *(("events", "big"), ("big", "sums"), ("sums", "rejections"), ("hourly", "sink:copy")),
        *(("events", "late"), ("late", REQUESTS), (REQUESTS, "events")),
    }
    assert ("events", "sink:copy") not in _edges(graph)
    kinds = {edge["label"]: edge["kind"] for edge in graph["edges"] if edge.get("kind")}
    assert kinds == {"large": "pipe", "add": "reducer"}
    assert {name for edge in graph["edges"] for name in (edge["from"], edge["to"])} <= set(columns)


def test_rows_backlog_freshness_and_quality_are_on_it() -> None:
    """What the summary says of a source or sink is at its node and edge."""
    facts = {
        "latest": {
            **dict.fromkeys(("late", "dead"), 3),
            "released": 70,
            "retained": 2,
            "sources": {"web": {"read": 80}},
            "statuses": {"web": "active", "shop": "idle"},
        },
        "holder": {"member": "web/0"},
        "stale": {"shop": 90.0},
        "lag": {"web": 1200},
        "freshness": {"web": {"sealed": [1, 2, 3], "visible": [2, 4, 8]}},
        "sinks": {"copy": 40, "near": 1, "iceberg": 0},
        "quality": {"verdict": "warn", "failed": [{"suite": "late_rows", "id": "late_ratio"}]},
    }
    files = {"kind": "files", "path": "out/"}
    graph = build_graph(_spec(sinks={"copy": files, "near": {**files, "path": "near/"}}), facts, 0)
    nodes = {node["id"]: node for node in graph["nodes"]}
    web = next(edge for edge in graph["edges"] if edge["from"] == "source:web")
    assert (web["label"], web["fresh"]) == ("1,200 messages behind", 4)
    assert (nodes["source:web"]["rows"], nodes["source:web"]["tone"]) == (80, "good")
    assert (nodes["source:web"]["note"], web["held"]) == ("active", True)
    tones = [nodes[name]["tone"] for name in ("source:shop", "late", "dead_letters", "sink:copy")]
    assert tones == ["warn"] * 4
    assert nodes["sink:copy"]["note"] == "40 epochs behind"
    assert nodes["sink:near"]["note"] == "1 epoch behind"
    assert REQUESTS not in nodes


@pytest.mark.parametrize(
    ("order", "waiting", "label"),
    [
        ("arrival", 1200, "1,200 objects behind"),
        ("arrival", 1, "1 object behind"),
        ("keys", 2, "more objects wait"),
        ("keys", 0, ""),
    ],
)
def test_objects_that_wait_are_a_backlog(order: str, waiting: int, label: str) -> None:
    """All are known only where an arrival log counts them."""
    web = {**SOURCE, "path": "inbox/web", "discovery": {"order": order}}
    spec = PipelineSpec.model_validate({"name": "p", "sources": {"web": web}})
    graph = build_graph(spec, {"backlog": {"web": waiting}}, 0)
    assert [edge["label"] for edge in graph["edges"] if edge["from"] == "source:web"] == [label]
