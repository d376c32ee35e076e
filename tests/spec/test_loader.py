"""Bad specs: file, line, field, what was found, what is allowed."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import pytest

from tidegate.errors import ConfigurationError, FailureClass, TransientError
from tidegate.jobs.spec.loader import list_spec_warnings, load_spec, parse_spec
from tidegate.jobs.spec.pipeline import PipelineSpec
from tidegate.jobs.spec.window_specs import Aggregate

SHOP_WITH_WINDOW = """\
apiVersion: tidegate/v1
name: shop
sources:
  web:
    path: inbox/web/
    schema: {placed: timestamp}
    event_time: placed
    lag: 1s
release: {build_window: 2s}
"""

GOOD = """\
apiVersion: tidegate/v1
name: flights
sources:
  EWR:
    path: inbox/EWR/
    schema: {at: timestamp, delay: int, carrier: string}
    event_time: at
    lag: 30m
windows:
  hourly:
    kind: tumbling
    size: 1h
    keys: [carrier]
    aggregates: {flights: count(*), p99: "approx_quantile(delay, 0.99)"}
    lateness: 2h
"""


def test_a_good_spec_loads() -> None:
    """Durations become ticks, aggregates become models."""
    spec = parse_spec(GOOD)
    assert spec.sources["EWR"].lag == 30 * 60 * 1_000_000
    assert str(spec.windows["hourly"].aggregates["p99"]) == "approx_quantile(delay, 0.99)"


def test_python_api_equals_yaml() -> None:
    """The models are the Python API.

    The same pipeline built in Python is equal and has the same digest.
    """
    spec = parse_spec(GOOD)
    built = PipelineSpec.model_validate(
        {
            "name": "flights",
            "sources": {
                "EWR": {
                    "path": "inbox/EWR/",
                    "schema": {"at": "timestamp", "delay": "int", "carrier": "string"},
                    "event_time": "at",
                    "lag": "30m",
                }
            },
            "windows": {
                "hourly": {
                    "kind": "tumbling",
                    "size": "1h",
                    "keys": ["carrier"],
                    "aggregates": {
                        "flights": "count(*)",
                        "p99": Aggregate.model_validate("approx_quantile(delay, 0.99)"),
                    },
                    "lateness": "2h",
                }
            },
        }
    )
    assert built == spec
    assert built.digest() == spec.digest()


def test_canonical_json_reads_back() -> None:
    """A spec's canonical JSON is itself a spec, equal to the first."""
    spec = parse_spec(GOOD)
    assert parse_spec(spec.canonical_json()) == spec


@pytest.mark.parametrize(
    ("edit", "finding"),
    [
        (("lag: 30m", "lag: 30"), ":8: sources.EWR.lag: a duration needs a unit"),
        (("lag: 30m", "lag: soon"), ":8: sources.EWR.lag: not a duration: 'soon'"),
        (("    lag: 30m\n", ""), ":4: sources.EWR: a source needs a 'lag'"),
        (
            ("lateness", "latness"),
            ":15: windows.hourly.latness: unknown field, did you mean 'lateness'?",
        ),
        (
            ("kind: tumbling", "kind: hopping"),
            ":11: windows.hourly.kind: Input should be 'tumbling'",
        ),
        (("size: 1h", "size: -1h"), ":12: windows.hourly.size: must not be negative"),
        (("size: 1h", "size: 0s"), ":12: windows.hourly.size: Input should be greater than 0"),
        (
            ("count(*)", "counts(*)"),
            ":14: windows.hourly.aggregates.flights: not an aggregate: 'counts(*)'",
        ),
        (("keys: [carrier]", "keys: [airline]"), "windows.hourly.keys: no column airline"),
        (("event_time: at", "event_time: when"), "event_time: column 'when' is not in the schema"),
        (
            ("delay: int", "delay: integer"),
            ":6: sources.EWR.schema.delay: unknown column type 'integer'",
        ),
        (
            ("delay: int", 'delay: int, "o\'clock": int'),
            "column names cannot contain quotes, backslashes or control characters",
        ),
        (
            ("    lag: 30m", "    timezone: Europe/Berln\n    lag: 30m"),
            "sources.EWR.timezone: 'Europe/Berln' is not the name of a time zone",
        ),
        (("hourly:", "late:"), "window names late are reserved"),
        (("name: flights", "name: Flights!"), ":2: name: names are lower case"),
        (("name: flights", "name: [x"), "not valid YAML"),
        (("name: flights", "name: 2026-02-30"), ":2: not valid YAML: day is out of range"),
        (("name: flights", "? [[a]]\n: b"), ":1: not valid YAML: a key has a list in it"),
        (("name: flights", "name: " + "[" * 1200), ":1: not valid YAML: it is nested too deeply"),
        (("name: flights", "name: " + "1" * 5000), ":2: not valid YAML: Exceeds the limit"),
        (("name: flights", "name: flights\npreset: [flink]"), ":3: preset: Input should be"),
    ],
)
def test_a_bad_spec_names_line_field_and_choices(edit: tuple[str, str], finding: str) -> None:
    """Every mistake is answered with where it is and what would be right."""
    with pytest.raises(ConfigurationError) as caught:
        parse_spec(GOOD.replace(*edit), where="p.yaml")
    assert finding in caught.value.message
    assert caught.value.failure_class is FailureClass.CONFIGURATION


def test_all_findings_at_once() -> None:
    """A spec with several mistakes lists all of them."""
    with pytest.raises(ConfigurationError) as caught:
        parse_spec(GOOD.replace("lag: 30m", "lag: x").replace("lateness", "latness"))
    assert caught.value.message.count("\n") == 1


def test_missing_file_is_no_traceback(tmp_path: Path) -> None:
    """A wrong path is a configuration error that says what to give."""
    with pytest.raises(ConfigurationError, match="cannot read the spec"):
        load_spec(tmp_path / "none.yaml")


@pytest.mark.parametrize(
    "preset", ["nscldaq", "streaminsight", "hazelcast", "flink", "pipet", "wire"]
)
def test_own_settings_win_over_the_preset(preset: str) -> None:
    """A preset only sets defaults."""
    raw: dict[str, Any] = {
        "name": "p",
        "preset": preset,
        "release": {"mode": "ordered"},
        "coalesce": {"idle_timeout": "7s"},
        "sources": {
            "a": {"path": "x/", "schema": {"t": "timestamp"}, "event_time": "t", "lag": "3s"}
        },
    }
    spec = PipelineSpec.model_validate(raw)
    assert (spec.release.mode, spec.coalesce.idle_timeout, spec.sources["a"].lag) == (
        "ordered",
        7_000_000,
        3_000_000,
    )


def test_errors_survive_pickling() -> None:
    """Errors cross process borders with all their fields."""
    error = TransientError("m", code="c", pipeline="p", kept="k", advice="a", retry_after=2.0)
    again = pickle.loads(pickle.dumps(error))
    assert again.as_dict() == error.as_dict()
    assert type(again) is TransientError


def test_a_barrier_timeout_of_never_is_not_the_default() -> None:
    """Left out, it is four times the build window; `never` also comes back from a stored spec."""
    text = SHOP_WITH_WINDOW
    assert parse_spec(text).barrier_timeout == 8_000_000
    never = parse_spec(text + "barriers: {timeout: never}\n")
    assert never.barrier_timeout is None
    assert '"timeout":"never"' in never.canonical_json()
    again = PipelineSpec.model_validate_json(never.canonical_json())
    assert (again.barrier_timeout, again.digest()) == (None, never.digest())
    set_ = parse_spec(text + "barriers: {timeout: 3s}\n")
    assert set_.barrier_timeout == 3_000_000


def test_an_idle_timeout_that_does_not_count_is_a_warning() -> None:
    """A source of one partition has the output's, unless its own differs from the default."""
    own = "    coalesce: {idle_timeout: 60s}\n"
    text = SHOP_WITH_WINDOW.replace("    lag: 1s\n", "    lag: 1s\n" + own)
    said = [w for w in list_spec_warnings(parse_spec(text)) if "idle_timeout of web" in w]
    assert said == []
    text += "coalesce: {idle_timeout: 5m}\n"
    assert [w for w in list_spec_warnings(parse_spec(text)) if "idle_timeout of web" in w]
    other = text.replace("60s", "61s")
    assert not [w for w in list_spec_warnings(parse_spec(other)) if "idle_timeout of web" in w]
