"""The pipeline as a graph for the Streams page: what its rows pass, and how each part is.

Rows per table are not in it: the page knows them from the tables.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from tidegate.jobs.spec.pipeline import DEAD_LETTERS, EVENTS, LATE, PipelineSpec
from tidegate.jobs.spec.stream_specs import REJECTIONS, PipeSpec

REQUESTS = "merge requests"
"""Node of the requests to merge late rows, rejections and dead letters into history."""


def build_graph(spec: PipelineSpec, facts: Mapping[str, Any], open_requests: int) -> dict[str, Any]:
    """Return the nodes and edges of a pipeline; each node has a `column`, from left to right.

    Args:
        spec: the pipeline.
        facts: the stream's summary (`StreamView.summary`).
        open_requests: merge requests that wait for someone.
    """
    nodes = [*_list_sources(spec, facts), *_list_outputs(spec, facts, open_requests)]
    edges = [
        *(
            {"from": f"source:{s}", "to": EVENTS, **_describe_source(s, facts)}
            for s in spec.sources
        ),
        *({"from": EVENTS, "to": name} for name in (*spec.windows, LATE, DEAD_LETTERS)),
        *(
            {"from": one.origin, "to": to, "label": name, "kind": _name_attachment(one)}
            for name, one in spec.stream_graph.attachments.items()
            for to in one.destinations
        ),
        *({"from": stream, "to": REJECTIONS} for stream in spec.streams),
        *({"from": name, "to": REQUESTS} for name in (LATE, DEAD_LETTERS) if open_requests),
        *({"from": REQUESTS, "to": EVENTS, "back": True} for _ in range(bool(open_requests))),
    ]
    last = max(node["column"] for node in nodes) + 1
    for name, sink in spec.sinks.items():
        behind = (facts.get("sinks") or {}).get(name)
        tone = "warn" if behind and behind > spec.outputs.publish_every else "good"
        note = "" if behind is None else f"{behind} epochs behind"
        found = {"id": f"sink:{name}", "name": name, "kind": f"{sink.kind} sink", "note": note}
        nodes.append({**found, "column": last, "tone": tone if behind is not None else "off"})
        tables = sink.tables or spec.table_names
        shown = {node["id"] for node in nodes}
        edges += [{"from": t, "to": found["id"]} for t in tables if t in shown]
    return {"nodes": nodes, "edges": edges}


def _list_sources(spec: PipelineSpec, facts: Mapping[str, Any]) -> Iterable[dict[str, Any]]:
    latest = facts.get("latest") or {}
    for name, source in spec.sources.items():
        rows = (latest.get("sources") or {}).get(name, {})
        status = (latest.get("statuses") or {}).get(name, "not read yet")
        ill = name in (facts.get("silent") or {}) or name in (facts.get("stale") or {})
        yield {
            "id": f"source:{name}",
            "name": name,
            "kind": f"{source.format} source",
            "column": 0,
            "rows": rows.get("read", 0),
            "note": status,
            "tone": "warn" if ill else "good" if status == "active" else "off",
        }


def _describe_source(name: str, facts: Mapping[str, Any]) -> dict[str, Any]:
    """Backlog and freshness of a source, for its edge."""
    behind = (facts.get("lag") or {}).get(name)
    holder = (facts.get("holder") or {}).get("member") or ""
    visible = ((facts.get("freshness") or {}).get(name) or {}).get("visible")
    return {
        "label": "" if behind is None else f"{behind:,} messages behind",
        "held": holder.partition("/")[0] == name,
        "fresh": visible[1] if visible else None,
        "tone": "warn" if name in (facts.get("stale") or {}) else "off",
    }


def _list_outputs(
    spec: PipelineSpec, facts: Mapping[str, Any], open_requests: int
) -> Iterable[dict[str, Any]]:
    latest = facts.get("latest") or {}
    failed = [check.get("suite") for check in (facts.get("quality") or {}).get("failed") or ()]
    depth = _measure_depths(spec)
    late = {"rows": latest.get("late", 0), "tone": "warn" if "late_rows" in failed else "good"}
    dead = {"rows": latest.get("dead", 0), "tone": "warn" if latest.get("dead") else "good"}
    waiting = f"{latest.get('retained', 0):,} wait for order"
    events = {"rows": latest.get("released", 0), "note": waiting}
    yield {"id": EVENTS, "name": EVENTS, "kind": "released rows", **events, "column": 1} | {
        "tone": "bad" if (facts.get("quality") or {}).get("verdict") == "fail" else "good"
    }
    for name, window in spec.windows.items():
        yield _make_table(name, f"{window.kind} window", 2)
    for name in spec.streams:
        yield _make_table(name, "stream", depth[name])
    if spec.streams:
        yield _make_table(REJECTIONS, "rejected dispatches", max(depth.values()) + 1)
    yield _make_table(LATE, "late rows", 2) | late
    yield _make_table(DEAD_LETTERS, "unreadable rows", 2) | dead
    if open_requests:
        note = f"{open_requests} open: tidegate splice list {spec.name}"
        yield _make_table(REQUESTS, "merge", 3) | {"note": note, "tone": "warn"}


def _make_table(name: str, kind: str, column: int) -> dict[str, Any]:
    return {"id": name, "name": name, "kind": kind, "column": column, "tone": "good"}


def _measure_depths(spec: PipelineSpec) -> dict[str, int]:
    """Return the column of each stream: one behind the stream that it is written from."""
    depth = {EVENTS: 1}
    for stream in spec.stream_graph.order[1:]:  # each comes after its origins
        origins = [
            one.origin
            for one in spec.stream_graph.attachments.values()
            if stream in one.destinations
        ]
        depth[stream] = 1 + max((depth[origin] for origin in origins), default=1)
    return depth


def _name_attachment(one: Any) -> str:
    return "pipe" if isinstance(one, PipeSpec) else "reducer"
