"""A spec in several environments, and variables in its values."""

from __future__ import annotations

from pathlib import Path

import pytest

from tidegate.errors import ConfigurationError
from tidegate.jobs.spec.environments import list_environments, list_fixed_fields, merge_values
from tidegate.jobs.spec.field_rules import FIELDS, RULES
from tidegate.jobs.spec.job_spec import JobSpec
from tidegate.jobs.spec.loader import load_any_spec, load_spec, render_spec
from tidegate.jobs.spec.pipeline import PipelineSpec
from tidegate.jobs.spec.variables import replace_variables

SPEC = """\
name: orders
sources:
  a:
    schema: {t: timestamp, k: string}
    event_time: t
    lag: 1s
    path: in/a
    limits: {objects: 8}
windows:
  w: {kind: tumbling, size: 1h, aggregates: {n: count(*)}}
"""


@pytest.fixture(autouse=True)
def _no_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """The environment of whoever runs the tests does not matter."""
    monkeypatch.delenv("TIDEGATE_ENV", raising=False)


@pytest.fixture
def spec(tmp_path: Path) -> Path:
    """The spec in a file of its own folder."""
    path = tmp_path / "orders.yaml"
    path.write_text(SPEC)
    return path


def write(spec: Path, name: str, text: str) -> Path:
    """A file of an environment beside the spec."""
    file = spec.parent / "envs" / name
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)
    return file


def refuse(spec: Path, environment: str | None = "prod") -> str:
    """The message with which the spec is refused."""
    with pytest.raises(ConfigurationError) as refused:
        load_any_spec(spec, environment)
    return refused.value.message


def test_an_environment_is_merged_name_by_name(spec: Path) -> None:
    """Mappings are merged, lists are replaced, null deletes; the file for one spec comes last."""
    write(spec, "prod.yaml", "description: shared\nsources: {a: {path: s3://big/in, lag: 5s}}\n")
    write(spec, "prod/orders.yaml", "sources: {a: {lag: 2s, limits: null}}\n")
    found = load_any_spec(spec, "prod")
    assert isinstance(found, PipelineSpec)
    source = found.sources["a"]
    assert (source.path, source.lag, source.limits.objects) == ("s3://big/in", 2_000_000, None)
    assert found.description == "shared"
    assert merge_values({"a": [1, 2], "b": 1}, {"a": [3]}) == {"a": [3], "b": 1}
    assert load_spec(spec).sources["a"].path == "in/a"


def test_a_deployment_has_its_environment(spec: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`TIDEGATE_ENV` is the default; specs without environments are the same in all."""
    monkeypatch.setenv("TIDEGATE_ENV", "prod")
    assert load_spec(spec).sources["a"].path == "in/a"
    write(spec, "prod.yaml", "sources: {a: {path: prod/a}}\n")
    write(spec, "dev.yaml", "sources: {a: {path: dev/a}}\n")
    assert load_spec(spec).sources["a"].path == "prod/a"
    assert load_any_spec(spec, "dev").sources["a"].path == "dev/a"  # type: ignore[union-attr]
    assert list_environments(spec) == ["dev", "prod"]


def test_an_unknown_environment_is_refused(spec: Path) -> None:
    """With the environments that there are."""
    write(spec, "dev.yaml", "description: d\n")
    message = refuse(spec)
    assert "has no environment prod" in message
    assert message.endswith("it has: dev")


@pytest.mark.parametrize(
    ("text", "line", "field"),
    [
        ("name: other\n", 1, "name"),
        ("sources:\n  a:\n    event_time: k\n", 3, "sources.a.event_time"),
        ("sources:\n  a:\n    timezone: Europe/Berlin\n", 3, "sources.a.timezone"),
        ("sources:\n  a:\n    schema: {k: int}\n", 3, "sources.a.schema.k"),
        ("sources:\n  a: null\n", 2, "sources.a"),
        ("windows:\n  w:\n    keys: [k]\n", 3, "windows.w.keys"),
        ("windows:\n  w: {size: 1m}\n", 2, "windows.w.size"),
        ("preset: wire\n", 1, "preset"),
    ],
)
def test_environments_must_not_differ_in_what_results_mean(
    spec: Path, text: str, line: int, field: str
) -> None:
    """Identity, event time and keys; the message names the file of the environment."""
    file = write(spec, "prod.yaml", text)
    assert f"{file}:{line}: {field}: environments must not differ here: " in refuse(spec)


def test_an_environment_adds_no_source(spec: Path) -> None:
    """Its event time would be in one environment only."""
    added = "sources:\n  b: {path: in/b, event_time: t, lag: 1s, schema: {t: timestamp}}\n"
    write(spec, "prod.yaml", added)
    assert "sources.b.event_time: environments must not differ here" in refuse(spec)


def test_the_same_value_is_no_difference(spec: Path) -> None:
    """An environment may repeat what the spec says."""
    write(spec, "prod.yaml", "name: orders\nsources: {a: {event_time: t}}\n")
    assert load_any_spec(spec, "prod") == load_spec(spec)


def test_a_mistake_is_found_in_the_file_that_makes_it(spec: Path) -> None:
    """A wrong value of the environment, and one of the spec."""
    file = write(spec, "prod.yaml", "description: d\nsources:\n  a:\n    lag: soon\n")
    assert f"{file}:4: sources.a.lag: " in refuse(spec)
    spec.write_text(SPEC.replace("size: 1h", "size: 1 hour"))
    file.write_text("description: d\n")
    assert f"{spec}:10: windows.w" in refuse(spec)


def test_every_rule_and_field_that_is_fixed_exists() -> None:
    """The table names rules and fields that the models have."""
    fields = {*FIELDS[PipelineSpec], *FIELDS[JobSpec]}
    assert list_fixed_fields().keys() <= RULES.keys() | fields


def test_variables_in_any_value(spec: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also as a number, with a default, and as the characters themselves."""
    monkeypatch.setenv("BUCKET", "s3://orders")
    monkeypatch.setenv("MOST", "7")
    text = SPEC.replace("in/a", "${BUCKET}/in/${PLACE:-eu}").replace(
        "objects: 8", "objects: '${MOST}'"
    )
    spec.write_text(f"{text}description: costs $${{MUCH}}\n")
    found = load_spec(spec)
    assert found.sources["a"].path == "s3://orders/in/eu"
    assert found.sources["a"].limits.objects == 7
    assert found.description == "costs ${MUCH}"
    copy = spec.with_name("copy.yaml")
    copy.write_text(render_spec(spec))
    monkeypatch.delenv("BUCKET")
    assert load_spec(copy) == found


def test_a_rendered_spec_keeps_the_order_of_its_names(spec: Path) -> None:
    """A driver in cluster mode, which runs the rendered spec, gives each row the same position.

    Rows of equal time are released in the order of the sources.
    """
    more = "  z: {path: in/z, schema: {t: timestamp, b: long, a: long}, event_time: t, lag: 1s}"
    spec.write_text(SPEC.replace("sources:", f"sources:\n{more}"))
    rendered = render_spec(spec)
    assert rendered.index("  z:") < rendered.index("  a:")
    assert rendered.index("b: long") < rendered.index("a: long")


def test_a_variable_that_is_not_set_is_refused_by_name(spec: Path) -> None:
    """With its line; Airflow's parser goes on, because only the driver may have it."""
    spec.write_text(SPEC.replace("in/a", "${NOWHERE}/a"))
    message = refuse(spec, None)
    assert f"{spec}:7: sources.a.path: the variable NOWHERE is not set" in message
    found = load_any_spec(spec, needs_variables=False)
    assert isinstance(found, PipelineSpec)
    assert found.sources["a"].path == "${NOWHERE}/a"


def test_variables_of_a_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A job has them as a pipeline does."""
    monkeypatch.setenv("DAY", "monday")
    path = tmp_path / "j.yaml"
    path.write_text('kind: job\nname: j\napp: a.py\nargs: ["--day", "${DAY}"]\n')
    found = load_any_spec(path)
    assert isinstance(found, JobSpec)
    assert found.args == ("--day", "monday")


def test_passwords_of_addresses_stay_variables(
    tmp_path: Path, spec: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The stored spec must not have them; their driver replaces them."""
    monkeypatch.setenv("PW", "geheim")
    address = "postgres://u:${PW}@host/db"
    spec.write_text(f"{SPEC}sinks: {{s: {{kind: postgres, url: '{address}'}}}}\n")
    assert "geheim" not in load_spec(spec).model_dump_json()
    assert "geheim" not in render_spec(spec)
    assert replace_variables(address, {"PW": "x"}) == ("postgres://u:x@host/db", [])
