"""What Airflow sees when it parses the DAGs folder."""

from __future__ import annotations

import inspect
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

import pytest
from airflow.sdk import DAG

from tidegate.errors import ConfigurationError
from tidegate.operators import factory, get_provider_info
from tidegate.operators.factory import build_dags, check_specs
from tidegate.operators.sweep_operator import SweepOperator

REPOSITORY = Path(__file__).resolve().parents[2]
HEAVY = (
    "pyspark",
    "py4j",
    "great_expectations",
    "pyiceberg",
    "boto3",
    "botocore",
    "pandas",
    "pyarrow",
    "duckdb",
    "fastapi",
)

SPEC = """\
apiVersion: tidegate/v1
name: {name}
sources:
  one: {{path: inbox/one, schema: {{at: timestamp}}, event_time: at, lag: 1m}}
supervision: {{sweep: "{cron}"}}
"""

# Counted beyond what Airflow imports by itself for any DAG file with these base classes. Calls are
# counted, not seconds: other work on the machine does not change their number.
_MEASURE = """
import sys, json
calls = 0
def count_call(frame, event, argument):
    global calls
    calls += event in ("call", "c_call")
sys.setprofile(count_call)
import airflow.providers.standard.operators.trigger_dagrun
from airflow.sdk import DAG, Asset, AssetWatcher, BaseOperator, Param, RetryRule
from airflow.triggers.base import BaseEventTrigger
before, airflow_calls = set(sys.modules), calls
from tidegate.operators.factory import build_dags
dags = build_dags(sys.argv[1])
share = (calls - airflow_calls) / airflow_calls
sys.setprofile(None)
import tidegate.operators.plugin
print(json.dumps([share, sorted(set(sys.modules) - before), sorted(dags)]))
"""


def _write(folder: Path, name: str, cron: str = "*/5 * * * *") -> None:
    (folder / f"{name}.yaml").write_text(SPEC.format(name=name, cron=cron))


def _swept(dag: DAG) -> list[str]:
    look = dag.get_task("look")
    assert isinstance(look, SweepOperator)
    return sorted(look.pipelines)


def _measure(folder: Path) -> tuple[float, list[str], list[str]]:
    """Calls of import and build, as a share of those that Airflow itself needs.

    The modules that came along; the DAGs.
    """
    done = subprocess.run(
        [sys.executable, "-c", _MEASURE, str(folder)],
        capture_output=True,
        text=True,
        check=True,
        env=dict(os.environ),
        timeout=280,
    )
    share, modules, dags = json.loads(done.stdout.splitlines()[-1])
    return share, modules, dags


@pytest.mark.airflow
def test_parsing_imports_nothing_heavy() -> None:
    """The demo's DAGs need a fifth of Airflow's own calls at most, and no heavy package comes along,
    also not by the plugin.
    """
    share, modules, dags = _measure(REPOSITORY / "dags" / "pipelines")
    packages = {name.partition(".")[0] for name in modules}
    assert packages.isdisjoint(HEAVY), packages & set(HEAVY)
    kinds = ("stream", "stop", "recover", "pin", "deploy", "abort_barrier", "quality", "maintain")
    assert {*(f"flights.{kind}" for kind in kinds), "tidegate.sweep"} <= set(dags)
    assert share < 0.2


@pytest.mark.airflow
def test_a_hundred_pipelines_parse_with_few_calls(tmp_path: Path) -> None:
    """A folder of a hundred, with seven DAGs each, needs at most 1.3 times the calls of Airflow."""
    for number in range(100):
        _write(tmp_path, f"p{number:03}")
    share, _, dags = _measure(tmp_path)
    assert len(dags) == 701
    assert share < 1.3


def test_a_broken_spec_leaves_the_others_alone(tmp_path: Path) -> None:
    """The good pipeline has its DAGs.

    The bad one becomes a DAG that fails, and an import error, with file, line and field.
    """
    _write(tmp_path, "good")
    (tmp_path / "bad.yaml").write_text("apiVersion: tidegate/v1\nname: bad\nsauces: {}\n")
    dags = build_dags(tmp_path)
    assert {"good.stream", "good.recover", "good.quality", "good.maintain", "tidegate.sweep"} < set(
        dags
    )
    wrong = r"bad\.yaml:3: sauces: unknown field, did you mean 'sources'"
    assert re.search(wrong, str(dags["tidegate.broken_specs"].description))
    with pytest.raises(ConfigurationError, match=wrong):
        dags["tidegate.broken_specs"].task_dict["read"].execute({})  # type: ignore[union-attr]
    with pytest.raises(ConfigurationError, match=wrong):
        check_specs(tmp_path)
    (tmp_path / "bad.yaml").unlink()
    check_specs(tmp_path)


def test_a_renamed_or_deleted_file_takes_only_its_own_dags(tmp_path: Path) -> None:
    """A new name is a new pipeline with DAGs of its own.

    A deleted file's are gone; nothing else moves.
    """
    _write(tmp_path, "stays")
    _write(tmp_path, "before")
    kept = {dag for dag in build_dags(tmp_path) if dag.startswith(("stays.", "tidegate."))}
    (tmp_path / "before.yaml").unlink()
    assert set(build_dags(tmp_path)) == kept
    _write(tmp_path, "after")
    assert {dag.partition(".")[0] for dag in build_dags(tmp_path)} == {"stays", "after", "tidegate"}


def test_two_specs_with_one_name_are_refused(tmp_path: Path) -> None:
    """The second file is the broken one; the first keeps its DAGs."""
    _write(tmp_path, "same")
    (tmp_path / "zz.yaml").write_text((tmp_path / "same.yaml").read_text())
    dags = build_dags(tmp_path)
    assert "same.stream" in dags
    assert re.search(
        r"zz\.yaml:1: name: 'same' is taken by .*same\.yaml",
        str(dags["tidegate.broken_specs"].description),
    )


def test_notifiers_are_airflow_s_own(tmp_path: Path) -> None:
    """Every task of every pipeline calls them when it fails; without any nothing is called."""
    _write(tmp_path, "a")

    def tell(context: object) -> None:
        """Someone."""

    told = build_dags(tmp_path, on_failure=[tell])
    tasks = [task for dag in told.values() for task in dag.tasks if task.task_id != "start"]
    assert len(tasks) > 5
    assert all(task.on_failure_callback == [tell] for task in tasks)
    assert build_dags(tmp_path)["a.stream"].get_task("stream").on_failure_callback == []


def test_pipelines_with_one_cron_share_a_sweep(tmp_path: Path) -> None:
    """One sweep process for all pipelines with the same cron; another cron gets another sweep."""
    _write(tmp_path, "a")
    _write(tmp_path, "b")
    _write(tmp_path, "c", "0 * * * *")
    dags = build_dags(tmp_path)
    assert _swept(dags["tidegate.sweep"]) == ["a", "b"]
    assert _swept(dags["tidegate.sweep.0_x_x_x_x"]) == ["c"]


def test_crons_with_the_same_letters_have_sweeps_of_their_own(tmp_path: Path) -> None:
    """The ids of their DAGs differ."""
    for name, cron in (("a", "*/5 * * * *"), ("b", "0 6 * * 1-5"), ("c", "0 6 * * 1,5")):
        _write(tmp_path, name, cron)
    swept = [
        _swept(dag) for name, dag in build_dags(tmp_path).items() if name.startswith("tidegate.")
    ]
    assert sorted(swept) == [["a"], ["b"], ["c"]]


def test_a_bad_cron_breaks_only_its_own_pipeline(tmp_path: Path) -> None:
    """It is named with file, line and field; the others keep their DAGs."""
    _write(tmp_path, "good")
    _write(tmp_path, "bad", "0 25 * * *")
    dags = build_dags(tmp_path)
    assert {"good.stream", "tidegate.sweep", "tidegate.broken_specs"} <= set(dags)
    assert not [name for name in dags if name.startswith("bad.")]
    with pytest.raises(ConfigurationError, match=r"bad\.yaml:5: supervision\.sweep: '0 25"):
        check_specs(tmp_path)


def test_dags_that_airflow_refuses_break_only_their_own_pipeline(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever the reason is."""
    _write(tmp_path, "good")
    _write(tmp_path, "bad")
    build = factory._PipelineDags.build

    def refuse_one(self: Any, quality_every: float) -> Iterator[DAG]:
        """Refuse in the middle of one pipeline's DAGs."""
        for number, dag in enumerate(build(self, quality_every)):
            if number and self._spec.name == "bad":
                raise ValueError("not like this")
            yield dag

    monkeypatch.setattr(factory._PipelineDags, "build", refuse_one)
    dags = build_dags(tmp_path)
    assert {"good.stream", "tidegate.broken_specs"} <= set(dags)
    assert not [name for name in dags if name.startswith("bad.")]
    assert _swept(dags["tidegate.sweep"]) == ["good"]
    assert "bad.yaml: Airflow cannot build" in str(dags["tidegate.broken_specs"].doc_md)


def test_a_spec_that_is_not_read_is_named(tmp_path: Path) -> None:
    """Otherwise a file that was renamed would lose its supervision without a word."""
    _write(tmp_path, "good")
    (tmp_path / "beta.yml").write_text(SPEC.format(name="beta", cron="0 * * * *"))
    assert {"good.stream", "tidegate.broken_specs"} <= set(build_dags(tmp_path))
    with pytest.raises(ConfigurationError, match=r"beta\.yml: not read: .* ends in \.yaml"):
        check_specs(tmp_path)


_DAG_FILE = """\
from tidegate.operators.factory import build_dags
globals().update(build_dags({first!r}, conn_id={one!r}))
globals().update(build_dags({second!r}, conn_id={two!r}))
"""


@pytest.mark.parametrize("conn_ids", [(None, "lake"), (None, None), ("lake", "lake"), ("a", "b")])
def test_two_folders_each_keep_their_sweep(
    tmp_path: Path, conn_ids: tuple[str | None, str | None]
) -> None:
    """Also with one store, and with one pipeline name in both, which the second folder reports."""
    first, second = tmp_path / "one" / "specs", tmp_path / "two" / "specs"
    for folder, names in ((first, ("alpha", "same")), (second, ("beta", "same"))):
        folder.mkdir(parents=True)
        for name in names:
            _write(folder, name)
        (folder / "bad.yaml").write_text("apiVersion: tidegate/v1\nname: bad\nsauces: {}\n")
    file: dict[str, Any] = {}
    code = _DAG_FILE.format(first=str(first), second=str(second), one=conn_ids[0], two=conn_ids[1])
    exec(code, file)
    dags = {name: dag for name, dag in file.items() if isinstance(dag, DAG)}
    sweeps = [dag for name, dag in dags.items() if name.startswith("tidegate.sweep")]
    assert sorted(_swept(dag) for dag in sweeps) == [["alpha", "same"], ["beta"]]
    stream: Any = dags["same.stream"].get_task("stream")
    assert stream.spec == str(first / "same.yaml")
    told = [
        str(dag.doc_md) for name, dag in dags.items() if name.startswith("tidegate.broken_specs")
    ]
    assert [str(first / "bad.yaml") in text for text in told] == [True, False]
    assert [f"'same' is taken by {first / 'same.yaml'}" in text for text in told] == [False, True]
    exec(code, file)  # the file is read again
    assert {name for name, dag in file.items() if isinstance(dag, DAG)} == set(dags)


def test_a_single_folder_keeps_its_ids(tmp_path: Path) -> None:
    """Airflow knows the history of a DAG by its id."""
    _write(tmp_path, "a")
    assert "tidegate.sweep" in build_dags(tmp_path)
    assert "tidegate.sweep.store_lake" in build_dags(tmp_path, conn_id="lake")


def test_the_provider_names_modules_that_exist() -> None:
    """Airflow lists the provider, and everything it names can be imported."""
    info = get_provider_info()
    named = [
        m
        for kind in ("operators", "triggers")
        for group in info[kind]
        for m in group["python-modules"]
    ]
    for module in named:
        assert find_spec(module) is not None, module
    for link in info["extra-links"]:
        assert resolve_name(link)


def test_names_in_a_live_airflow_database_stay() -> None:
    """Deferred tasks and asset watchers name classes, methods and arguments; upgrades must keep
    them.
    """
    for path in ("trigger.StreamTrigger", "assets.SealTrigger"):
        assert resolve_name(f"tidegate.operators.{path}").__name__ == path.partition(".")[2]
    resume = inspect.signature(
        resolve_name("tidegate.operators.stream_operator.StreamOperator.resume")
    )
    assert list(resume.parameters) == ["self", "context", "event", "launched", "budget", "past"]


def test_a_job_gets_the_dags_that_are_not_about_rows(tmp_path: Path) -> None:
    """It is supervised and swept like a pipeline."""
    (tmp_path / "clicks.yaml").write_text("{kind: job, name: clicks, app: clicks.py}")
    dags = build_dags(tmp_path)
    kinds = ("stream", "stop", "recover", "pin", "deploy", "maintain", "quality")
    assert set(dags) == {*(f"clicks.{kind}" for kind in kinds), "tidegate.sweep"}
    look: Any = dags["tidegate.sweep"].get_task("look")
    assert look.pipelines == ["clicks"]
