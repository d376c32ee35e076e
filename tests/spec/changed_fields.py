"""For each field of a spec, a valid spec and the same spec with another value in the field.

The values are tried one after the other until the models accept one that has an effect. A field
that needs a special value has it in `VALUES`. A field without any such value is in `NO_VALUES`.
"""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any, Literal, get_args, get_origin

from pydantic import ValidationError
from tests.spec.field_effects import list_models

from tidegate.jobs.spec.ineffective_fields import list_ineffective_fields
from tidegate.jobs.spec.job_spec import JobSpec
from tidegate.jobs.spec.pipeline import PipelineSpec

Raw = dict[str, Any]


def merge(base: Mapping[str, Any], *changes: Mapping[str, Any]) -> Raw:
    """A copy with these fields in it; null takes one out."""
    found = copy.deepcopy(dict(base))
    for change in changes:
        for name, value in change.items():
            if value is None:
                found.pop(name, None)
            elif isinstance(value, Mapping) and isinstance(found.get(name), Mapping):
                found[name] = merge(found[name], value)
            else:
                found[name] = copy.deepcopy(value)
    return found


SCHEMA = {
    "t": "timestamp",
    "v": "long",
    "kind": "string",
    "n": "long",
    "u": "timestamp",
    "q": "string",
}
_SOURCE = {
    "path": "inbox/x/",
    "schema": SCHEMA,
    "event_time": "t",
    "lag": "0",
    "barriers": {"kind": "kind", "types": ["cut"], "id": "n"},
    "rules": {"known": {"predicate": "v is not null"}},
}
_WINDOW = {
    "kind": "tumbling",
    "size": "10s",
    "keys": ["kind"],
    "aggregates": {"n": "count(*)", "s": "sum(v)"},
}
_SINKS: Raw = {
    "database": {"kind": "postgres", "url": "postgresql://h/d"},
    "files": {"kind": "files", "path": "out"},
    "hook": {"kind": "webhook", "url": "https://example.org/x"},
    "topic": {"kind": "kafka", "servers": "b:9092", "topic": "out"},
}
BASE: Raw = {
    "name": "p",
    "sources": {"a": _SOURCE, "b": _SOURCE},
    "windows": {"w": _WINDOW},
    "streams": {
        "copy": {"schema": SCHEMA},
        "second": {"schema": SCHEMA},
        "sums": {"schema": {"kind": "string", "total": "long"}},
        "totals": {"schema": {"kind": "string", "total": "long"}},
    },
    "pipes": {"copying": {"from": "events", "to": "copy", "where": "v > 0"}},
    "reducers": {
        "adding": {
            "from": "events",
            "to": "totals",
            "keys": ["kind"],
            "aggregates": {"total": "sum(v)"},
        }
    },
}
"""Sources, a window, a stream of each kind: rows are read and kept by it."""
JOB: Raw = {"kind": "job", "name": "j", "app": "app.py"}


# Beside the base: what a field needs to have a meaning. The first that takes a value is used.
_KAFKA: Raw = {"kind": "kafka", "path": "", "kafka": {"servers": "b:9092", "topic": "x"}}
_ICEBERG: Raw = {"table": {"format": "iceberg", "name": "n.a", "catalog": "sqlite:///a"}}
_PROTOBUF = {"payload": "protobuf", "schema_file": "x.proto", "message": "M"}
_EDGES: Raw = {
    "sources": {"a": {"edges": {"kind": "kind", "keys": ["v"]}}},
    "windows": {"w": {"late_unit": "event"}},
}
_SETTINGS: tuple[Raw, ...] = (
    {},
    {"sinks": _SINKS},
    {"sources": {"a": _KAFKA}},
    {"sources": {"a": _ICEBERG}},
    {"sources": {"a": {"table": {"format": "delta"}}}},
    {"sources": {"a": {"landing": {"format": "json"}}}},
    {"sources": {"a": {"barriers": {"punctuation": "mark"}, "punctuation": {"explicit": True}}}},
    {"sources": {"a": {"lag": None, "wall_clock": {"lag": "5s"}}}},
    {"sources": {"a": {"coalesce": {}}}},
    _EDGES,
    {"windows": {"w": {"kind": "session", "gap": "5s", "size": None}}},
    {"windows": {"w": {"kind": "sliding", "slide": "5s"}}},
    {
        "windows": None,
        "streams": None,
        "pipes": None,
        "reducers": None,
        "release": {"glom": {"dt": "5s"}},
    },
    {"sources": {"a": {"format": "csv"}}},
    {"sources": {"a": {"discovery": {"order": "arrival"}}}},
    {"sources": {"a": merge(_KAFKA, {"kafka": {"payload": "avro", "schema_file": "x.avsc"}})}},
    {"sources": {"a": merge(_KAFKA, {"kafka": {"payload": "avro", "registry": "http://r"}})}},
    {"supervision": {"submit": {"conn_id": "spark"}}},
    {"supervision": {"approval": True}},
    {"splice": {"offer_rows": 5}},
    {"outputs": {"layout": {"events": {"partition_by": ["day(t)"]}}}},
)
_CANDIDATES: tuple[Any, ...] = (
    # A text before a number: a spec on disk writes a duration with its unit.
    *(True, False, "v > 1", "7s", "5m", "2h", 7, 3, 2, 1, 0.5, 0),
    *("other", "inbox/y/", "u", "kind", "csv", "max(n)", "https://x.org/y", "@weekly", "env:T"),
    *([one] for one in ("v", "kind", "other", "a", "events", "w")),
    *({"other": one} for one in ("x", "string", "count(*)")),
    {},
)


def _name_source(**fields: Any) -> Raw:
    return {"sources": {"a": fields}}


_NONE: Raw = {}
_TOPIC = _name_source(**_KAFKA)
_TABLE = _name_source(**_ICEBERG)
_LANDING = _name_source(landing={"format": "json"})
_BY_FUNCTION: Raw = {
    "reducers": {"adding": {"aggregates": None, "function": "folds:add", "initial": {"total": 0}}}
}
_SAME = {name: name for name in SCHEMA}
_ALERTS = {
    "supervision": {"alerts": {"slack": "env:S", "pagerduty": "env:P", "alertmanager": "env:A"}}
}
VALUES: dict[str, tuple[Raw, Raw]] = {
    "apiVersion": (_NONE, {"apiVersion": "tidegate/v2"}),
    "preset": (_NONE, {"preset": "nscldaq"}),
    "kind": (_NONE, {"kind": "pipeline"}),
    "app": (_NONE, {"app": "other.py"}),
    "conf": (_NONE, {"conf": {"spark.executor.memory": "3g"}}),
    "sources.*.punctuation.import_from": (
        _name_source(barriers={"punctuation": "mark"}, punctuation={"explicit": True}),
        _name_source(punctuation={"import_from": "b"}),
    ),
    "sources.*.kind": (_NONE, _TOPIC),
    "sources.*.kafka.payload": (
        _TOPIC,
        _name_source(kafka={"payload": "avro", "schema_file": "x.avsc"}),
    ),
    "sources.*.kafka.message": (
        _name_source(**merge(_KAFKA, {"kafka": _PROTOBUF})),
        _name_source(kafka={"message": "Other"}),
    ),
    "sources.*.kafka.registry": (
        _name_source(**merge(_KAFKA, {"kafka": {"payload": "avro", "registry": "http://r"}})),
        _name_source(kafka={"registry": "http://other"}),
    ),
    "sources.*.kafka.headers": (_TOPIC, _name_source(kafka={"headers": {"kind": "kind"}})),
    "sources.*.kafka.tombstones": (
        _name_source(**merge(_KAFKA, {"kafka": {"timestamp": "t"}})),
        _name_source(kafka={"tombstones": "row"}),
    ),
    "sources.*.kafka.options": (
        _TOPIC,
        _name_source(kafka={"options": {"security.protocol": "SSL"}}),
    ),
    "sources.*.evolution.renamed": (_NONE, _name_source(evolution={"renamed": {"old": "v"}})),
    "sources.*.table.format": (
        _TABLE,
        _name_source(table={"format": "delta", "name": None, "catalog": None}),
    ),
    "sources.*.table.catalog_options": (
        _TABLE,
        _name_source(table={"catalog_options": {"warehouse": "x"}}),
    ),
    "sources.*.landing.options": (
        _LANDING,
        _name_source(landing={"options": {"multiLine": "true"}}),
    ),
    "sources.*.landing.columns": (_LANDING, _name_source(landing={"columns": {"v": "n"}})),
    "sources.*.edges.kind": (_EDGES, _name_source(edges={"kind": "q"})),
    "sources.*.schema": (
        {"pipes": None},
        {"sources": {name: {"schema": {"extra": "double"}} for name in "ab"}},
    ),
    "sources.*.select": (_NONE, {"sources": {name: {"select": _SAME} for name in "ab"}}),
    "sources.*.timezone": (_NONE, _name_source(timezone="Europe/Paris")),
    "windows.*.kind": (_NONE, {"windows": {"w": {"kind": "sliding", "slide": "5s"}}}),
    "windows.*.aggregates": (_NONE, {"windows": {"w": {"aggregates": {"m": "max(v)"}}}}),
    "streams.*.schema": (_NONE, {"streams": {"totals": {"schema": {"extra": "long"}}}}),
    "pipes.*.from": (
        {"pipes": {"more": {"from": "copy", "to": "second"}}},
        {"pipes": {"more": {"from": "events"}}},
    ),
    "pipes.*.to": (_NONE, {"pipes": {"copying": {"to": "second"}}}),
    "pipes.*.positions": (_NONE, {"pipes": {"copying": {"positions": [0, 5]}}}),
    "pipes.*.times": (_NONE, {"pipes": {"copying": {"times": ["2026-01-01T00:00:00Z", None]}}}),
    "pipes.*.keys": (_NONE, {"pipes": {"copying": {"keys": {"kind": ["data"]}}}}),
    "reducers.*.from": (_NONE, {"reducers": {"adding": {"from": "copy"}}}),
    "reducers.*.to": (_NONE, {"reducers": {"adding": {"to": "sums"}}}),
    "reducers.*.function": (_BY_FUNCTION, {"reducers": {"adding": {"function": "folds:more"}}}),
    "reducers.*.aggregates": (
        _NONE,
        {"reducers": {"adding": {"aggregates": {"total": "max(v)"}}}},
    ),
    "reducers.*.keys": (
        {"streams": {"totals": {"schema": {"n": "long"}}}},
        {"reducers": {"adding": {"keys": ["kind", "n"]}}},
    ),
    "outputs.events": (
        {**dict.fromkeys(("streams", "pipes", "reducers")), "release": {"mode": "pass_through"}},
        {"outputs": {"events": False}},
    ),
    "outputs.catalog_options": (
        {"outputs": {"catalog": "http://c"}},
        {"outputs": {"catalog_options": {"token": "env:T"}}},
    ),
    "sinks.*.kind": (
        {"sinks": {"s": _SINKS["files"]}},
        {"sinks": {"s": {**_SINKS["hook"], "path": None}}},
    ),
    "sinks.*.options": (
        {"sinks": {"s": _SINKS["topic"]}},
        {"sinks": {"s": {"options": {"compression.type": "zstd"}}}},
    ),
    "spark.conf": (_NONE, {"spark": {"conf": {"spark.sql.shuffle.partitions": "3"}}}),
    "supervision.backfill": (_NONE, {"supervision": {"backfill": "@weekly"}}),
    "supervision.submit.conf": (
        {"supervision": {"submit": {"conn_id": "s"}}},
        {"supervision": {"submit": {"conf": {"spark.executor.memory": "3g"}}}},
    ),
    **{
        f"supervision.alerts.{name}": (_ALERTS, {"supervision": {"alerts": {name: value}}})
        for name, value in {
            **dict.fromkeys(("slack", "pagerduty", "alertmanager"), "env:OTHER"),
            "pagerduty_url": "https://events.eu.pagerduty.com/v2/enqueue",
            "severity": "warning",
            "page": "https://airflow.example.org",
        }.items()
    },
    "quality.severity": (_NONE, {"quality": {"severity": {"late_ratio": "critical"}}}),
}


NO_VALUES = {
    (PipelineSpec, "apiVersion"),
    *((JobSpec, name) for name in ("apiVersion", "kind")),
    *((JobSpec, f"checkpoint.{name}") for name in ("min_interval", "idle_interval", "idle_epochs")),
    *((JobSpec, f"supervision.{name}") for name in ("backfill", "announce")),
}
"""Fields in which a file is refused whatever else they say: there is one version, another kind is
another model, and a job has some fields only because it shares them with pipelines."""


@dataclass(frozen=True)
class FieldChange:
    """Two specs that differ in one field.

    Attributes:
        is_valid: whether the file with the other value can be read.
    """

    field: str
    old: Raw
    new: Raw
    is_valid: bool = True


def find_change(model: type[PipelineSpec] | type[JobSpec], field: str) -> FieldChange | None:
    """The change of a field; None if no value is accepted."""
    base = BASE if model is PipelineSpec else JOB
    is_valid = (model, field) not in NO_VALUES
    if field in VALUES:
        setting, change = VALUES[field]
        old = merge(base, setting)
        return FieldChange(field, old, merge(old, change), is_valid)
    for setting in _SETTINGS:
        old = merge(base, setting)
        before = _dump(model, old, has_effect=is_valid)
        if before is None:
            continue
        for value in (*_list_choices(field), *_CANDIDATES):
            for place in _list_places(old, field):
                new = _put(old, place, value)
                after = _dump(model, new, has_effect=is_valid)
                if after is not None and list_paths(before, after) == {place}:
                    return FieldChange(field, old, new, is_valid)
    return None


def _list_choices(field: str) -> list[Any]:
    """The values that a field of this name is limited to."""
    return _CHOICES.get(field.rpartition(".")[2], [])


def _collect_choices() -> dict[str, list[Any]]:
    found: defaultdict[str, list[Any]] = defaultdict(list)
    for model in list_models():
        for name, field in model.model_fields.items():
            found[field.alias or name] += _iterate_choices(field.annotation)
    return dict(found)


def _iterate_choices(kind: Any) -> Iterator[Any]:
    if isinstance(kind, type) and issubclass(kind, Enum):
        yield from (one.value for one in kind)
    elif get_origin(kind) is Literal:
        yield from get_args(kind)
    else:
        for one in get_args(kind):
            yield from _iterate_choices(one)


_CHOICES = _collect_choices()


def _dump(model: Any, raw: Raw, *, has_effect: bool) -> Raw | None:
    """What the model makes of a spec; None if the spec is not valid."""
    try:
        spec = model.model_validate(raw)
    except ValidationError:
        return None
    if has_effect and list_ineffective_fields(spec):
        return None
    dumped: Raw = spec.model_dump(mode="json", by_alias=True)
    return dumped


def _list_places(raw: Raw, field: str) -> list[str]:
    """The field with the names of the spec for each ``*``."""
    places = [""]
    for part in field.split("."):
        if part != "*":
            places = [f"{place}.{part}".strip(".") for place in places]
            continue
        named = ((place, _find(raw, place)) for place in places)
        places = [f"{place}.{name}" for place, entries in named for name in entries or ()]
    return places


def _find(raw: Any, place: str) -> Any:
    for part in place.split("."):
        raw = raw.get(part) if isinstance(raw, Mapping) else None
    return raw


def _put(raw: Raw, place: str, value: Any) -> Raw:
    change: Any = value
    for part in reversed(place.split(".")):
        change = {part: change}
    return merge(raw, change)


def list_paths(left: Any, right: Any, prefix: str = "") -> set[str]:
    """The places in which two specs differ."""
    if left == right:
        return set()
    if isinstance(left, Mapping) and isinstance(right, Mapping):
        return {
            path
            for name in left.keys() | right.keys()
            for path in list_paths(left.get(name), right.get(name), f"{prefix}.{name}".strip("."))
        }
    return {prefix}
