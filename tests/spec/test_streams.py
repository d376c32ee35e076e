"""The streams section of a spec.

Names, columns, cycles, and what keyed pipes and splices may not do.
"""

from __future__ import annotations

from typing import Any

import pytest

from tidegate.errors import ConfigurationError
from tidegate.jobs.spec.loader import parse_spec
from tidegate.jobs.spec.pipeline import PipelineSpec

HEAD = """
apiVersion: tidegate/v1
name: p
sources:
  s: {path: in/, schema: {t: timestamp, shop: string, amount: double}, event_time: t, lag: 1s}
"""
GOOD = """
streams:
  big: {}
  totals: {schema: {shop: string, total: double}}
  report: {schema: {shop: string, total: double}, buffer: true}
pipes:
  pick: {from: events, to: big, where: amount > 100, inherit: true}
  show: {from: totals, to: report, times: ["2026-01-01T00:00:00Z", null]}
reducers:
  sum: {from: big, to: totals, function: "shops:total", keys: [shop], merge: splice}
"""


def spec_of(text: str) -> PipelineSpec:
    """A spec with this streams section."""
    return parse_spec(HEAD + text)


def test_streams_are_worked_on_in_the_order_of_their_dependencies() -> None:
    """Columns of a piped stream come from its origin; every stream is a table."""
    spec = spec_of(GOOD)
    assert spec.stream_graph.order == ("events", "big", "totals", "report")
    assert dict(spec.stream_graph.columns["big"]) == dict(spec.columns)
    assert spec.stream_graph.writers_of("totals") == ["sum"]
    assert spec.stream_graph.readers_of("big") == ["sum"]
    assert {"big", "totals", "report", "rejections"} <= set(spec.table_names)
    assert spec.pipes["show"].times == (1_767_225_600_000_000, None)


@pytest.mark.parametrize("kind", ["decimal(6, 2)", "decimal(6,2)"])
def test_a_stream_may_write_a_type_as_its_origin_does(kind: str) -> None:
    """A space in a decimal type makes no other column."""
    text = (HEAD + GOOD).replace("amount: double", '"amount": "decimal(6, 2)"')
    schema = f'{{schema: {{t: timestamp, shop: string, amount: "{kind}"}}}}'
    spec = parse_spec(text.replace("big: {}", f"big: {schema}"))
    assert dict(spec.stream_graph.columns["big"]) == spec.columns


def test_the_spec_survives_json() -> None:
    """The spec in the bucket reads back as the same spec, and the JSON Schema names the new
    sections.
    """
    spec = spec_of(GOOD)
    assert PipelineSpec.model_validate_json(spec.canonical_json()) == spec
    properties: dict[str, Any] = PipelineSpec.model_json_schema()["properties"]
    assert {"streams", "pipes", "reducers"} <= set(properties)


def test_without_streams_there_is_no_new_table() -> None:
    """A pipeline that dispatches nothing has the tables it always had."""
    assert "rejections" not in spec_of("").table_names


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "streams: {a: {}}\npipes: {p: {from: events, to: a, inherit: true, keys: {shop: [x]}}}",
            "stamps of different keys",
        ),
        (
            "streams: {a: {}}\npipes: {p: {from: b, to: a}}",
            r"pipes\.p\.from: no stream named 'b'; there are events, a",
        ),
        (
            "streams: {a: {}}\npipes: {p: {from: events, to: events}}",
            "events are what the sources give",
        ),
        (
            (
                "streams: {a: {schema: {x: long}}, b: {schema: {x: long}}}\n"
                "pipes: {p: {from: a, to: b}}\nreducers: {r: {from: b, to: a, function: 'm:f'}}"
            ),
            "a <- b <- a is a cycle",
        ),
        ("streams: {a: {schema: {x: long}}}\npipes: {p: {from: a, to: a}}", "a <- a is a cycle"),
        (
            "streams: {a: {}}\nreducers: {r: {from: events, to: a, function: 'm:f'}}",
            r"streams\.a\.schema: needed",
        ),
        ("streams: {a: {schema: {x: long}}}\npipes: {p: {from: events, to: a}}", "other columns"),
        ("streams: {a: {}}", "nothing writes to it"),
        ("streams: {late: {schema: {x: long}}}", "taken by tables"),
        ("streams: {a: {schema: {x: money}}}", "unknown column type"),
        ("streams: {a: {schema: {_x: long}}}", "tidegate's own"),
        (
            "streams: {a: {}}\npipes: {p: {from: events, to: a, keys: {city: [x]}}}",
            "no column city in events",
        ),
        (
            (
                "streams: {a: {schema: {x: long}}, b: {schema: {x: long}}}\n"
                "reducers: {r: {from: events, to: [a, b], function: 'm:f', merge: splice}}"
            ),
            "one destination",
        ),
        (
            (
                "streams: {a: {schema: {x: long}}}\nreducers: {r: {from: events, to: a, function:"
                " total}}"
            ),
            "package.module:function",
        ),
        (
            "streams: {a: {schema: {x: long}}}\nreducers: {r: {from: events, to: a}}",
            "either a 'function' or 'aggregates'",
        ),
        (
            (
                "streams: {a: {schema: {x: long}}}\nreducers: {r: {from: events, to: a, aggregates:"
                " {x: distinct(shop)}}}"
            ),
            "does not run along; choose from count, sum",
        ),
        (
            (
                "streams: {a: {schema: {x: long}}}\nreducers: {r: {from: events, to: a, aggregates:"
                " {y: count(*)}}}"
            ),
            "a has no column y",
        ),
    ],
)
def test_what_cannot_work_is_refused_with_the_reason(text: str, message: str) -> None:
    """Before anything runs, in words."""
    with pytest.raises(ConfigurationError, match=message):
        spec_of(text)
