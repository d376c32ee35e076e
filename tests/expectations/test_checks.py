from __future__ import annotations

import subprocess
import sys
import zipfile
from pathlib import Path
from typing import get_args

import pytest

import tidegate
from tidegate.errors import ConfigurationError
from tidegate.expectations.suite_files import limit_values, load_suites
from tidegate.jobs.spec.pipeline import PipelineSpec
from tidegate.jobs.spec.table_layout import DeadLetterReason, LateReason

GOOD = """\
suite: mine
title: Mine
checks:
  - {id: own, summary: release, says: one event, expect: expect_column_values_to_be_in_set,
     kwargs: {column: events, value_set: [1]}}
"""


def with_quality(spec: PipelineSpec, **quality: object) -> PipelineSpec:
    """The spec with a `quality` section."""
    return PipelineSpec.model_validate(spec.model_dump(by_alias=True) | {"quality": quality})


def test_suites_know_every_reason(spec: PipelineSpec) -> None:
    """A reason that the mover writes and the suite does not list would fail every quality run that
    meets it.
    """
    checks = {check.id: check for suite in load_suites(spec) for check in suite.checks}
    assert checks["late_reasons"].kwargs["value_set"] == list(get_args(LateReason))
    assert checks["dead_reasons"].kwargs["value_set"] == list(get_args(DeadLetterReason))


def test_built_in_suites_cover_every_part(spec: PipelineSpec) -> None:
    """The five suites of the issue are there and load."""
    assert {s.suite for s in load_suites(spec)} == {
        "late_rows",
        "barriers",
        "checkpoints",
        "dead_letters",
        "release",
    }


def test_there_are_no_checks_for_what_a_pipeline_does_not_have(spec: PipelineSpec) -> None:
    """Without barriers, windows, streams or an events table no one reads checks about them."""
    plain = spec.model_dump(by_alias=True)
    for source in plain["sources"].values():
        source["barriers"] = None
    window = {"kind": "tumbling", "size": "1h", "aggregates": {"n": "count(*)"}}
    without = {"outputs": {"events": False}, "release": {"mode": "pass_through"}}
    lean = PipelineSpec.model_validate(plain | without | {"windows": {"w": window}})
    assert {s.suite for s in load_suites(lean)} == {"late_rows", "checkpoints", "dead_letters"}

    def list_ids(of: PipelineSpec) -> set[str]:
        return {check.id for suite in load_suites(of) for check in suite.checks}

    assert list_ids(lean) - list_ids(spec) == {"late_share"}
    pipe = {"from": "events", "to": "d"}
    streams = PipelineSpec.model_validate(
        spec.model_dump(by_alias=True) | {"streams": {"d": {}}, "pipes": {"p": pipe}}
    )
    assert list_ids(streams) - list_ids(spec) == {"stream_rejections"}


def test_durations_become_seconds(spec: PipelineSpec) -> None:
    """Suites compare seconds, the spec speaks of durations."""
    changed = with_quality(spec, limits={"lateness_p99": "90s"})
    assert limit_values(changed)["lateness_p99"] == 90.0


def test_limits_reach_the_arguments(spec: PipelineSpec) -> None:
    """A limit of the spec replaces the default in arguments and sentence."""
    changed = with_quality(spec, limits={"late_ratio": 0.25})
    check = next(c for s in load_suites(changed) for c in s.checks if c.id == "late_ratio")
    limits = limit_values(changed)
    assert check.resolve_kwargs(limits)["max_value"] == 0.25
    assert "25%" in check.says.format(**limits)


def test_severity_is_overridden_and_switched_off(spec: PipelineSpec) -> None:
    """The spec decides how serious a check is; `off` removes it."""
    changed = with_quality(spec, severity={"late_ratio": "critical", "barrier_ids": "off"})
    checks = {c.id: c for s in load_suites(changed) for c in s.checks}
    assert checks["late_ratio"].severity == "critical"
    assert "barrier_ids" not in checks


def test_unknown_check_in_severity_is_refused(spec: PipelineSpec) -> None:
    """A misspelt check id is an error that lists the real ones."""
    with pytest.raises(ConfigurationError) as caught:
        load_suites(with_quality(spec, severity={"late_ration": "off"}))
    assert "late_ration" in str(caught.value)
    assert "late_ratio" in str(caught.value.advice)


def test_own_folder_adds_and_replaces(spec: PipelineSpec, tmp_path: Path) -> None:
    """A file with a new name adds a suite, one named like a built-in replaces it."""
    (tmp_path / "mine.yaml").write_text(GOOD)
    (tmp_path / "release.yaml").write_text(
        GOOD.replace("mine", "release").replace("own", "replaced")
    )
    suites = {s.suite: s for s in load_suites(with_quality(spec, suites=str(tmp_path)))}
    assert [c.id for c in suites["mine"].checks] == ["own"]
    assert [c.id for c in suites["release"].checks] == ["replaced"]


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        ("summary: release", "summary: releases", "no summary 'releases'"),
        ("value_set: [1]", "value_set: {limit: nope}", "no limit 'nope'"),
        ("says: one event", "says: '{nope}'", "nope"),
        ("title: Mine", "titel: Mine", "titel"),
        ("suite: mine", "suite: [", "mine.yaml"),
        ("suite: mine", "suite: 2026-02-30", "line 1: day is out of range for month"),
        ("suite: mine", "suite: mine\n? [[a]]\n: b", "a key has a list in it"),
    ],
)
def test_broken_suite_names_file_and_fault(
    spec: PipelineSpec, tmp_path: Path, old: str, new: str, says: str
) -> None:
    """A wrong suite file is a configuration error that says where and what."""
    (tmp_path / "mine.yaml").write_text(GOOD.replace(old, new))
    with pytest.raises(ConfigurationError, match=r"mine\.yaml") as caught:
        load_suites(with_quality(spec, suites=str(tmp_path)))
    assert says in str(caught.value)


def test_missing_folder_is_refused(spec: PipelineSpec) -> None:
    """A folder that does not exist is named with its full path."""
    with pytest.raises(ConfigurationError, match="/nowhere"):
        load_suites(with_quality(spec, suites="/nowhere"))


def test_suites_are_read_from_inside_a_zip(tmp_path: Path) -> None:
    """Spark ships the package as a zip file; suites and templates travel in it."""
    package = Path(tidegate.__file__).parent
    archive = tmp_path / "tidegate.zip"
    with zipfile.ZipFile(archive, "w") as bundle:
        for module in package.glob("*.py"):
            bundle.write(module, f"tidegate/{module.name}")
        for folder in ("checkpoints", "expectations", "jobs"):
            base = (package / folder).resolve()  # a link in the checkout, a folder in the wheel
            for file in base.rglob("*"):
                if file.suffix in (".py", ".toml", ".yaml", ".html", ".css"):
                    bundle.write(file, f"tidegate/{folder}/{file.relative_to(base)}")
    code = """
import sys; sys.path.insert(0, sys.argv[1])
from importlib import resources
from tidegate.expectations.suite_files import load_suites
from tidegate.jobs.spec.pipeline import PipelineSpec
assert ".zip" in load_suites.__code__.co_filename
source = {"path": "x", "schema": {"t": "timestamp"}, "event_time": "t", "lag": "1s"}
print(len(load_suites(PipelineSpec.model_validate({"name": "p", "sources": {"a": source}}))))
print(len((resources.files("tidegate.expectations") / "templates" / "run.html").read_text()))
"""
    done = subprocess.run(
        [sys.executable, "-c", code, str(archive)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert int(done.stdout.split()[0]) == 4  # it has neither barriers nor streams


@pytest.mark.parametrize(
    ("summary", "column", "says"),
    [
        ("table.lates", "reason", "mine.yaml:5: checks.0.summary: flights has no table 'lates'"),
        ("table.late", "reasons", "mine.yaml:7: checks.0.kwargs.column: no column 'reasons' in"),
        ("dropped", "rows", "mine.yaml:7: checks.0.kwargs.column: no column 'rows' in dropped"),
        ("droppd", "rows", "mine.yaml:5: checks.0.summary: flights has no summary 'droppd'"),
    ],
)
def test_unknown_names_in_a_suite_are_named_at_their_line(
    spec: PipelineSpec, tmp_path: Path, summary: str, column: str, says: str
) -> None:
    """A table, column or summary that does not exist is an error with file, line and field."""
    (tmp_path / "mine.yaml").write_text(
        "suite: mine\ntitle: Mine\nchecks:\n  - id: own\n"
        f"    summary: {summary}\n    expect: expect_column_values_to_not_be_null\n"
        f"    kwargs: {{column: {column}}}\n    says: fine\n"
    )
    with pytest.raises(ConfigurationError) as error:
        load_suites(with_quality(spec, suites=str(tmp_path)))
    assert says in error.value.message
