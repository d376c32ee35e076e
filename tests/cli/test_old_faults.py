"""Faults that were found in commit e3dab94, shown by commands and files alone.

The tests of the repaired functions need names that this commit does not have. These run on it too,
and are red there: `make faults ARGS="--on e3dab94"`. So this module imports only names that
this commit has.
"""

from __future__ import annotations

import csv
import dataclasses
import errno
import os
import re
from pathlib import Path

import pyarrow as pa
import pytest
import yaml  # type: ignore[import-untyped]
from typer.testing import CliRunner

from tidegate.checkpoints.local_store import LocalStore
from tidegate.errors import ConfigurationError, TidegateError
from tidegate.jobs.cli.main import app
from tidegate.jobs.cli.page_results import PipelineResults
from tidegate.jobs.driver.error_classification import classify_error
from tidegate.jobs.spec.pipeline import PipelineSpec
from tidegate.jobs.spec.spec_changes import LiveState, compare_specs

_SPEC = """\
apiVersion: tidegate/v1
name: p
sources:
  a:
    path: orders/
    format: json
    schema: {at: timestamp, v: long}
    event_time: at
    lag: 1m
release: {mode: ordered}
"""


def _validate(folder: Path, spec: str) -> tuple[int, str]:
    """Return the exit code and the output of `tidegate validate` for a spec."""
    file = folder / "spec.yaml"
    file.write_text(spec)
    result = CliRunner().invoke(app, ["validate", str(file)])
    return result.exit_code, result.output


def test_a_spec_whose_field_has_no_effect_is_refused(tmp_path: Path) -> None:
    """With its line (newcomer-7)."""
    spec = _SPEC.replace("format: json", "format: json\n    parse: {delimiter: ;}")
    code, output = _validate(tmp_path, spec)
    assert code == 2
    assert "spec.yaml:7" in output


def test_a_refused_spec_shows_no_secret(tmp_path: Path) -> None:
    """Though the mistake is beside it (ops-X1)."""
    sink = "sinks: {pg: {kind: postgres, url: 'mysql://u:271828182@host/db'}}"
    code, output = _validate(tmp_path, _SPEC + sink)
    assert code == 2
    assert "271828182" not in output


def test_names_that_differ_in_case_only_are_refused(tmp_path: Path) -> None:
    """One column would take the other's value (bugs-B06)."""
    spec = _SPEC.replace("v: long", "v: long, V: long")
    assert _validate(tmp_path, spec)[0] == 2


def test_containers_of_spark_have_no_secrets_of_airflow() -> None:
    """Neither its variables nor its folders (ops-X4)."""
    file = next((Path(__file__).parents[2] / "infra").rglob("*compose*.y*ml"))
    services = yaml.safe_load(file.read_text())["services"]
    spark = {name: one for name, one in services.items() if name.startswith("spark")}
    assert spark
    found = [key for one in spark.values() for key in one.get("environment", ())]
    assert [key for key in found if key.startswith("AIRFLOW")] == []


def test_no_cell_of_a_download_is_a_formula(monkeypatch: pytest.MonkeyPatch) -> None:
    """A spreadsheet would run a text of the data that begins like one."""
    rows = pa.table({"said": ["=1+1", "@now", "plain", None]})
    monkeypatch.setattr(PipelineResults, "_read_newest", lambda *_: rows)
    found = PipelineResults.export_rows(PipelineResults.__new__(PipelineResults), "late")
    assert [*csv.reader(str(found["csv"]).splitlines())] == [
        ["said"],
        ["'=1+1"],
        ["'@now"],
        ["plain"],
        [],
    ]


def test_a_disk_that_fails_is_no_defect(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A driver waits for it, as for other errors of a store."""
    store = LocalStore(tmp_path)
    store.put("p/a.json", b"x")

    def fail(*_: object) -> None:
        raise OSError(errno.EIO, "Input/output error")

    with monkeypatch.context() as patch:
        patch.setattr(os, "scandir", fail)
        with pytest.raises((OSError, TidegateError)) as failed:
            list(store.list_objects("p/"))
    assert classify_error("p", failed.value).code == "store.unavailable"


_WINDOW = {"kind": "tumbling", "size": "10m", "aggregates": {"n": "count(*)"}}


def _judge_change(before: str, after: str) -> list[str]:
    """Return the verdicts on a change of a spec whose window is open and has an output frontier."""
    # The reviewed commit does not ask how far the output has come.
    known = {field.name for field in dataclasses.fields(LiveState)}
    state = {"windows": frozenset({"w"}), "frontier": 3_600_000_000}
    live = LiveState(**{name: value for name, value in state.items() if name in known})  # type: ignore[arg-type]
    old, new = (PipelineSpec.model_validate(yaml.safe_load(text)) for text in (before, after))
    return [change.verdict.value for change in compare_specs(old, new, live)]


def _with_window(**changes: str) -> str:
    return f"{_SPEC}{yaml.safe_dump({'windows': {'w': {**_WINDOW, **changes}}})}"


def test_a_window_that_was_purged_is_not_opened_by_a_larger_lateness() -> None:
    """Its published result would be replaced by one of the late rows alone (core-C4)."""
    assert _judge_change(_with_window(), _with_window(lateness="1h")) == ["refused"]


def test_the_state_of_an_open_window_keeps_its_form() -> None:
    """Every driver ended at a window that began or ceased to fire in between (core-C10)."""
    assert _judge_change(_with_window(), _with_window(fire_every="1m")) == ["refused"]
    assert _judge_change(_with_window(fire_every="1m"), _with_window()) == ["refused"]


def test_a_first_time_zone_is_allowed() -> None:
    """All rows without a zone were dead letters before (newcomer-3)."""
    zone = _SPEC.replace("event_time: at", "event_time: at\n    timezone: Europe/Paris")
    assert _judge_change(_SPEC, zone) == ["kept"]


def test_a_file_whose_name_is_not_utf8_is_read(tmp_path: Path) -> None:
    """No record could name it, so every driver ended; its key has an escaped name (core-C7)."""
    store = LocalStore(tmp_path / "store")
    store.put("inbox/a.json", b"x")
    inbox = os.fsencode(tmp_path / "store" / "inbox")
    os.makedirs(os.path.join(inbox, b"c-\xe9"))
    for odd in (b"b-\xe9.json", b"c-\xe9/\\d.json"):
        with open(os.path.join(inbox, odd), "wb") as file:
            file.write(odd)
    escaped = ["inbox/b-%E9.json", "inbox/c-%E9/%5Cd.json"]
    assert [one.key for one in store.list_objects("inbox/")] == ["inbox/a.json", *escaped]
    assert [one.key for one in store.list_objects("inbox/", start_after=escaped[0])] == escaped[1:]
    assert store.list_folders("inbox/") == ["c-%E9"]
    assert [store.get(key).data for key in escaped] == [b"b-\xe9.json", b"c-\xe9/\\d.json"]
    long = b"\xe9" * 100  # its key is longer than a name may be
    with open(os.path.join(inbox, long), "wb") as file:
        file.write(long)
    assert store.get(f"inbox/{'%E9' * 100}").data == long
    assert len(list(store.list_objects("inbox/"))) == 4
    assert [store.stat(key) for key in ("inbox/a%00%E9", "inbox/..%2Fa%E9")] == [None, None]
    store.put(escaped[0], b"another")
    with pytest.raises(ConfigurationError, match=r"inbox/b-%E9\.json"):
        list(store.list_objects("inbox/"))


def test_no_documented_duration_is_in_microseconds() -> None:
    """A spec takes `10m`, and the page says so (newcomer-11)."""
    options = (Path(__file__).parents[2] / "docs" / "options.md").read_text("utf-8")
    defaults = re.findall(r"\| duration \| `(\w+)` \|", options)
    assert defaults
    assert [one for one in defaults if one.isdigit() and one != "0"] == []
