"""The specs of schedules: a seed chooses one, so that the protocol meets every kind of state.

They are few and live as long as this module: a spec is validated once, and what follows from it is
kept by `cheap`.
"""

from __future__ import annotations

from functools import cache
from random import Random
from typing import Any

from tests.engine.harness import spec_of
from tests.simulation.coverage import OF_STREAMS, READING, SPLICING, TOPICS

from tidegate.jobs.spec.pipeline import PipelineSpec

PLAIN = "plain"
MEMBERS = "members"
LANDING = "landing"
OBJECTS = "objects"
PUNCTUATION = "punctuation"
TOPIC = "a topic"
STREAMS = "streams"
_SOURCE: dict[str, Any] = {
    "path": "inbox/x/",
    "schema": {"t": "timestamp", "v": "long", "kind": "string", "n": "long"},
    "event_time": "t",
    "lag": "3s",
    "barriers": {"kind": "kind", "types": ["cut"], "id": "n"},
    "limits": {"rows": 4},
}
_SINKS: dict[str, dict[str, Any]] = {
    "": {},
    "postgres": {"kind": "postgres", "url": "postgresql://u@h/d", "windows": "upsert"},
    "kafka": {
        "kind": "kafka",
        "servers": "h:9092",
        "topic": "{table}",
        "delivery": "exactly_once",
    },
    "webhook": {"kind": "webhook", "url": "http://h/"},
    "files": {"kind": "files", "path": "out", "format": "jsonl"},
}
SINK_KINDS = tuple(kind for kind in _SINKS if kind)
_SUMS = {"n": "count(*)", "s": "sum(v)"}
_FOLDERS = {
    **_SOURCE,
    "partition_by": "folder",
    "coalesce": {"members": "discovered", "idle_timeout": "3s", "joins": "hold"},
}


def _punctuated(**options: Any) -> dict[str, Any]:
    """A source whose frontier follows from punctuation alone."""
    plain = {name: value for name, value in _SOURCE.items() if name != "lag"}
    marks = {**_SOURCE["barriers"], "punctuation": "cti"}
    return {**plain, "barriers": marks, "punctuation": {"advance_to_end": True, **options}}


_PIPE = {"from": "copy", "to": "again", "attach": "on_request"}
_SHAPES: dict[str, dict[str, Any]] = {
    PLAIN: {},
    "rows that pass through": {"release": {"mode": "pass_through"}},
    "rows that wait for a commit": {"release": {"mode": "commit"}},
    "late rows that are flagged": {
        "release": {"on_late": "emit_flagged", "build_window": "5s"},
        "barriers": {"timeout": "5s"},
    },
    "built events": {"release": {"glom": {"dt": "2s"}, "on_late": "reject_to_origin"}},
    "sessions": {
        "windows": {"w": {"kind": "session", "gap": "4s", "keys": ["v"], "aggregates": _SUMS}}
    },
    "sliding windows": {
        "windows": {
            "w": {
                "kind": "sliding",
                "size": "10s",
                "slide": "5s",
                "lateness": "5s",
                "emit": "each_epoch",
                "aggregates": _SUMS,
            }
        }
    },
    "deltas": {
        "windows": {
            "w": {
                "kind": "tumbling",
                "size": "10s",
                "lateness": "20s",
                "revisions": "delta",
                "fire_every": "3s",
                "aggregates": _SUMS,
            }
        }
    },
    "windows without rows": {
        "windows": {
            "w": {
                "kind": "tumbling",
                "size": "5s",
                "keys": ["_source"],
                "zero_rows": True,
                "aggregates": _SUMS,
            }
        }
    },
    MEMBERS: {"sources": {"a": _FOLDERS, "b": _FOLDERS}, "coalesce": {"idle_timeout": "3s"}},
    OBJECTS: {
        "sources": {
            "a": {
                **_SOURCE,
                "path": "inbox/a/",
                "bounded": True,
                "discovery": {"order": "arrival", "safety_listing": "2s"},
            },
            "b": {**_SOURCE, "path": "inbox/b/", "bounded": True},
        }
    },
    LANDING: {
        "sources": {
            "a": {**_SOURCE, "path": "inbox/landed/", "bounded": True},
            "b": _SOURCE,
        }
    },
    PUNCTUATION: {
        "sources": {
            "a": _punctuated(explicit=True),
            "b": _punctuated(every_events=3, delay="3s"),
        }
    },
    TOPIC: {
        "sources": {
            "a": {
                name: value for name, value in _punctuated(explicit=True).items() if name != "path"
            }
            | {"kind": "kafka", "kafka": {"servers": "h:9092", "topic": "t"}},
            "b": _SOURCE,
        }
    },
    STREAMS: {
        "streams": {
            "copy": {},
            "again": {},
            "sums": {"schema": {"v": "long"}, "buffer": True},
        },
        "pipes": {
            "p": {"from": "events", "to": "copy", "inherit": True},
            "old": {"from": "events", "to": "again", "inherit": True, "positions": [2, 12]},
            "piecewise": {**_PIPE, "rows_per_epoch": 2},
            "spliced": {**_PIPE, "merge": "splice"},
        },
        "reducers": {
            "sum": {
                "from": "events",
                "to": "sums",
                "function": "tests.streams.folds:totals",
                "initial": 0,
                "keys": ["v"],
            }
        },
    },
    "groups of slots": {"outputs": {"publish_every": 2}},
    "barriers that hold no one": {"barriers": {"alignment": "pass", "identity": "id"}},
}
SHAPES = tuple(_SHAPES)
_KEYED = ("sessions", "windows without rows")  # the model of a database knows windows by their time


@cache
def spec_for(shape: str = PLAIN, sink: str = "") -> PipelineSpec:
    """Return the spec of a shape, with a sink of a kind beside the tables, or none."""
    fields = _SHAPES[shape]
    # A tight limit for some: with 3 a driver that does not wait was not found in a minute.
    tight = sink and "outputs" not in fields
    defaults: dict[str, Any] = {
        "sources": {"a": _SOURCE, "b": _SOURCE},
        "checkpoint": {
            "on_bad_checkpoint": "fork",
            "min_interval": "20ms",
            "idle_interval": "400ms",
            "maintain_every": "3s",
            "retain": 2,
            "retain_for": "1s",
        },
        "sinks": {sink: _SINKS[sink]} if sink else {},
    }
    outputs = {"max_unpublished": 1 if tight else 3, **fields.get("outputs", {})}
    return spec_of(**{**defaults, **fields, "outputs": outputs})


def choose_shape(rng: Random, sink: str, about: tuple[str, str] = ("", "")) -> str:
    """Draw a shape; half of the schedules have the plain one, on which most bugs are planted.

    What a schedule is about may happen under one shape only.
    """
    if about in OF_STREAMS or about[1] in SPLICING:
        return STREAMS
    if about[1] == "landing":
        return LANDING
    if about[1] in READING:
        return OBJECTS
    if about[1] in TOPICS:
        return TOPIC
    if rng.random() < 0.5:
        return PLAIN
    return rng.choice([shape for shape in SHAPES if sink != "postgres" or shape not in _KEYED])
