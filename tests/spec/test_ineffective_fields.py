"""A field that a file of a spec may have has an effect, or is refused with its line."""

from __future__ import annotations

from pathlib import Path

import pytest

from tidegate.errors import ConfigurationError
from tidegate.jobs.spec.ineffective_fields import find_cron_problem
from tidegate.jobs.spec.loader import list_unread_specs, load_any_spec
from tidegate.jobs.spec.pipeline import PipelineSpec

PIPELINE = """\
name: p
sources:
  a:
    schema: {t: timestamp, k: string}
    event_time: t
    lag: 1s
    SOURCE
windows:
  w: {kind: tumbling, size: 1h, aggregates: {n: count(*)}WINDOW}
END
"""
OBJECTS = "path: in/a"
TOPIC = "kind: kafka\n    kafka: {servers: 'b:9092', topic: t"


def load(folder: Path, text: str) -> object:
    """The spec of a text in a file."""
    path = folder / "p.yaml"
    path.write_text(text)
    return load_any_spec(path)


def pipeline(source: str = OBJECTS, window: str = "", end: str = "") -> str:
    """A pipeline with these fields."""
    text = PIPELINE.replace("SOURCE", source).replace("WINDOW", window)
    return text.replace("END", end)


def job(end: str) -> str:
    """A job with these fields."""
    return f"kind: job\nname: j\napp: a.py\n{end}\n"


@pytest.mark.parametrize(
    ("text", "line", "field"),
    [
        (pipeline(end='supervision: {sweep: "0 25 * * *"}'), 10, "supervision.sweep"),
        (pipeline(end="supervision: {maintain: every night}"), 10, "supervision.maintain"),
        (pipeline(end="supervision: {backfill: 0 0 0}"), 10, "supervision.backfill"),
        (pipeline(end="supervision:\n  backfill: 0 0 30 2 *"), 11, "supervision.backfill"),
        (pipeline(end="splice: {offer_rows: 1, offer_at: 6am}"), 10, "splice.offer_at"),
        (pipeline(end="splice: {offer_at: 0 7 * * *}"), 10, "splice.offer_at"),
        (pipeline(end="supervision: {approvers: [ines]}"), 10, "supervision.approvers"),
        (job("supervision: {sweep: hourly}"), 4, "supervision.sweep"),
        (job("supervision: {backfill: 0 5 * * 1}"), 4, "supervision.backfill"),
        (job("checkpoint: {min_interval: 1s}"), 4, "checkpoint.min_interval"),
        (pipeline(TOPIC + ', options: {a: "${B}"}}'), 8, "sources.a.kafka.options.a"),
        (pipeline(TOPIC + ", schema_id: 7}"), 8, "sources.a.kafka.schema_id"),
        (pipeline(TOPIC + ", registry_login: env:A}"), 8, "sources.a.kafka.registry_login"),
        (pipeline(TOPIC + ", on_unknown_schema: wait}"), 8, "sources.a.kafka.on_unknown_schema"),
        (pipeline(TOPIC + "}\n    limits: {bytes: 5}"), 9, "sources.a.limits.bytes"),
        (pipeline(TOPIC + "}\n    path: in/a"), 9, "sources.a.path"),
        (pipeline(OBJECTS + "\n    parse: {timestamps: ms}"), 8, "sources.a.parse.timestamps"),
        (
            pipeline(OBJECTS + "\n    format: json\n    parse: {delimiter: ;}"),
            9,
            "sources.a.parse.delimiter",
        ),
        (
            pipeline(OBJECTS + "\n    discovery: {notifications: false}"),
            8,
            "sources.a.discovery.notifications",
        ),
        (pipeline(window=", session_touch: separate"), 9, "windows.w.session_touch"),
    ],
)
def test_a_field_without_effect_is_refused_with_its_line(
    tmp_path: Path, text: str, line: int, field: str
) -> None:
    """The message names the file, the line and the field."""
    with pytest.raises(ConfigurationError) as refused:
        load(tmp_path, text)
    assert f"p.yaml:{line}: {field}: " in refused.value.message


@pytest.mark.parametrize(
    "text",
    [
        pipeline(end='supervision: {sweep: "@hourly", maintain: 0 2 * * mon-fri}'),
        pipeline(end="supervision: {approval: true, approvers: [ines]}"),
        pipeline(end="outputs: {catalog: '${CATALOG}'}"),
        pipeline(OBJECTS + "\n    format: csv\n    parse: {delimiter: ;, timestamps: ms}"),
        pipeline(end="sinks: {s: {kind: webhook, url: '${HOOK}'}}"),
    ],
)
def test_a_field_with_an_effect_is_accepted(tmp_path: Path, text: str) -> None:
    """Crons in all forms of Airflow, and variables where they are replaced."""
    assert load(tmp_path, text)


def test_what_a_bucket_keeps_stays_readable() -> None:
    """Checkpoints name their specs, which older versions have accepted."""
    source = {"path": "a", "schema": {"t": "timestamp"}, "event_time": "t", "lag": "1s"}
    raw = {"name": "p", "sources": {"a": {**source, "parse": {"timestamps": "ms"}}}}
    assert PipelineSpec.model_validate_json(PipelineSpec.model_validate(raw).canonical_json())


@pytest.mark.airflow
@pytest.mark.parametrize(
    "cron",
    ["*/5 * * * *", "0 25 * * *", "every night", "0 0 0", "6am", "@daily", "@never", "0 6 * * 1-5"],
)
def test_crons_are_judged_as_airflow_judges_them(cron: str) -> None:
    """A cron is accepted if and only if Airflow makes a timetable of it."""
    from airflow.exceptions import AirflowTimetableInvalid
    from airflow.timetables.trigger import CronTriggerTimetable

    try:
        CronTriggerTimetable(cron, timezone="UTC").validate()
        is_valid = True
    except AirflowTimetableInvalid:
        is_valid = False
    assert (find_cron_problem(cron) is None) == is_valid


def test_specs_that_are_not_read_are_found(tmp_path: Path) -> None:
    """Another ending, or a folder below; suites and hidden folders have none."""
    text = pipeline()
    for name in (
        "a.yaml",
        "b.yml",
        "team/c.yaml",
        ".git/d.yml",
        "team/suites.yaml",
        "a/b/c/d/e.yaml",
    ):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("checks: []\n" if "suites" in name else text)
    found = [str(path.relative_to(tmp_path)) for path in list_unread_specs(tmp_path)]
    assert found == ["b.yml", "team/c.yaml"]
