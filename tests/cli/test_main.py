from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from ruamel.yaml import YAML
from tests.cli.conftest import SPEC, Cli

from tidegate.checkpoints.local_store import LocalStore
from tidegate.checkpoints.slot_log import SlotLog
from tidegate.errors import FencedError, PoisonError, TransientError
from tidegate.jobs.cli import arguments, output
from tidegate.time_units import TICK_MAX, TICK_MIN


def test_help_imports_nothing_heavy() -> None:
    """`tidegate --help` answers at once: no pydantic, no Spark, no boto3, no Arrow."""
    code = "import sys; from tidegate.jobs.cli.main import app; print(*sys.modules)"
    loaded = set(
        subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, check=True
        ).stdout.split()
    )
    heavy = {
        "pydantic",
        "pyspark",
        "boto3",
        "pyarrow",
        "pandas",
        "airflow",
        "great_expectations",
        "pyiceberg",
        "duckdb",
    }
    assert loaded & heavy == set()


@pytest.mark.parametrize(
    "command",
    [
        ["validate", "flights.yaml"],
        ["plan", "flights.yaml"],
        ["plan", "flights.yaml", "--against", "flights.yaml"],
        ["deploy", "flights.yaml"],
        ["status"],
        ["status", "flights"],
    ],
)
def test_quick_commands_import_neither_spark_nor_arrow(
    log: SlotLog, spec_file: Path, command: list[str]
) -> None:
    """They read the spec and the log, and no rows."""
    assert log.head().record is not None
    code = (
        "import sys; from typer.testing import CliRunner; from tidegate.jobs.cli.main import app;"
        f"done = CliRunner().invoke(app, {command!r});"
        "print(done.exit_code, *sys.modules)"
    )
    environment = {k: v for k, v in os.environ.items() if not k.startswith("TIDEGATE_")}
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=True,
        cwd=spec_file.parent,
        env=environment,
    )
    exit_code, *loaded = done.stdout.split()
    # 12: the history of these tests names a spec that was not kept.
    assert exit_code in ("0", "12")
    heavy = {"pyspark", "pyarrow", "pandas", "numpy", "great_expectations", "airflow"}
    assert set(loaded) & heavy == set()


@pytest.mark.parametrize(
    "arguments",
    [["--help"], ["run", "-h"], ["checkpoints", "restore", "--help"], ["demo", "--help"]],
)
def test_help_is_there(cli: Cli, arguments: list[str]) -> None:
    """Every command explains itself."""
    assert "sage:" in cli(*arguments).out


def test_version(cli: Cli) -> None:
    """The version is printed alone."""
    from tidegate import __version__

    assert cli("--version").out.strip() == __version__


def test_unknown_pipeline_lists_the_known_ones(cli: Cli, log: SlotLog) -> None:
    """A misspelt name is a configuration error that offers what there is."""
    said = cli("checkpoints", "list", "flight")
    assert said.exit_code == 2
    assert "did you mean 'flights'" in said.err
    assert "known: flights" in said.err
    assert "Traceback" not in said.err


def test_looking_makes_no_store(cli: Cli, tmp_path: Path) -> None:
    """A reading command in an empty folder says so and leaves it empty."""
    said = cli("status")
    assert said.exit_code == 2
    assert "there is no store" in said.err
    assert list(tmp_path.iterdir()) == []


def test_error_with_json_is_an_envelope_too(cli: Cli, log: SlotLog) -> None:
    """Scripts find the error where they look for data; people find it on standard error."""
    said = cli("checkpoints", "show", "flights", "t9", "--json")
    assert said.data["code"] == "checkpoint.unknown"
    assert "next:" in said.err


@pytest.mark.parametrize(
    ("kind", "code"), [(PoisonError, 1), (TransientError, 3), (FencedError, 4)]
)
def test_exit_code_follows_the_class(
    cli: Cli, log: SlotLog, monkeypatch: pytest.MonkeyPatch, kind: type[PoisonError], code: int
) -> None:
    """Whoever calls can tell who has to act."""

    def fail(store: object) -> None:
        raise kind("it broke", code="x", kept="everything", advice="wait")

    monkeypatch.setattr(arguments, "list_pipelines", fail)
    said = cli("status")
    assert said.exit_code == code
    assert [line.split(":")[0] for line in said.err.strip().splitlines()] == [
        f"{kind.failure_class.value} error",
        "kept",
        "next",
    ]


def test_unexpected_error_has_no_traceback_unless_asked(
    cli: Cli, log: SlotLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A defect is one sentence, and the whole story with TIDEGATE_DEBUG=1."""

    def fail(store: object) -> None:
        raise RuntimeError("boom")

    monkeypatch.setattr(arguments, "list_pipelines", fail)
    said = cli("status")
    assert (said.exit_code, "RuntimeError: boom" in said.err, "Traceback" in said.err) == (
        1,
        True,
        False,
    )
    monkeypatch.setenv("TIDEGATE_DEBUG", "1")
    with pytest.raises(RuntimeError, match="boom"):
        cli("status")


def test_wrong_option_is_two(cli: Cli) -> None:
    """Usage errors share the code of configuration errors."""
    assert cli("status", "--nope").exit_code == 2


def test_store_comes_from_option_then_environment_then_folder(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The nearest word wins."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("TIDEGATE_STORE", raising=False)
    assert arguments.resolve_store_url(None) == ".tidegate/store"
    monkeypatch.setenv("TIDEGATE_STORE", "s3://env")
    assert arguments.resolve_store_url(None) == "s3://env"
    assert arguments.resolve_store_url("s3://own") == "s3://own"


def test_spec_is_found_by_name(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A name is looked up in dags/pipelines, and in $TIDEGATE_PIPELINES first."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("TIDEGATE_PIPELINES", raising=False)
    for folder in ("dags/pipelines", "mine"):
        (tmp_path / folder).mkdir(parents=True)
        (tmp_path / folder / "flights.yaml").write_text(SPEC)
    assert arguments.resolve_spec_path("flights") == Path("dags/pipelines/flights.yaml")
    monkeypatch.setenv("TIDEGATE_PIPELINES", str(tmp_path / "mine"))
    assert arguments.resolve_spec_path("flights") == tmp_path / "mine" / "flights.yaml"


def test_validate_names_line_and_field(cli: Cli, spec_file: Path) -> None:
    """A good spec is summed up, a bad one is taken apart; one bad one makes the exit code 2."""
    assert "valid; pipeline flights" in cli("validate", str(spec_file)).out
    bad = spec_file.with_name("bad.yaml")
    bad.write_text(SPEC.replace("lag: 1h", "lgg: 1h"))
    said = cli("validate", str(spec_file), str(bad), "--json")
    assert said.exit_code == 2
    assert [r["valid"] for r in said.data] == [True, False]
    assert "bad.yaml:4" in said.data[1]["error"]["message"]


def test_validate_says_where_outputs_are_computed(cli: Cli, spec_file: Path) -> None:
    """``-v`` names the engine of each output, and the reason where it is Spark SQL."""
    said = cli("validate", "-v", str(spec_file)).out
    assert "released and late rows: DuckDB, in Spark's Python tasks" in said
    assert "Spark SQL" not in said
    spec_file.write_text(SPEC.replace("lag: 1h", "lag: 1h, where: carrier like 'x'"))
    said = " ".join(cli("validate", "-v", str(spec_file)).out.split())
    assert "where, select and rules: Spark SQL, between Python tasks: source" in said
    assert "carrier LIKE 'x' is not proven equal in DuckDB" in said
    own = "aggregates: {n: approx_distinct(sched), last: 'sql(max_by(carrier, sched))'}"
    spec_file.write_text(SPEC + f"windows: {{w: {{kind: tumbling, size: 1h, keys: [], {own}}}}}\n")
    said = " ".join(cli("validate", "-v", str(spec_file)).out.split())
    assert "arguments of aggregates: Spark SQL, between Python tasks" in said
    assert "Spark SQL computes its sql(...) of the rows" in said


def test_validate_names_options_of_other_clients(cli: Cli, spec_file: Path) -> None:
    """Topics are read with librdkafka; variables may be set elsewhere."""
    topic = "kind: kafka, kafka: {servers: 'b:1', topic: t, options: {%s}}"
    spec_file.write_text(
        SPEC.replace("path: inbox/EWR", topic % "sasl.username: 'env:NOT_SET_HERE'")
    )
    assert "valid; pipeline flights" in cli("validate", str(spec_file)).out
    spec_file.write_text(SPEC.replace("path: inbox/EWR", topic % "fetch.max.wait.ms: '5'"))
    (said,) = cli("validate", str(spec_file), "--json").data
    assert said["error"]["code"] == "kafka.other_option"
    assert "fetch.wait.max.ms" in said["error"]["advice"]


def test_validate_takes_edge_events(cli: Cli, spec_file: Path) -> None:
    """If a pipeline with edge events has a window, `validate` refuses late revisions of its results."""
    window = (
        "windows: {w: {kind: tumbling, size: 1h, keys: [carrier], aggregates: {n: count(*)}}}\n"
    )
    spec_file.write_text(
        SPEC.replace("lag: 1h", "lag: 1h, edges: {kind: carrier, keys: [carrier]}") + window
    )
    said = cli("validate", str(spec_file))
    assert (said.exit_code, "lateness must be 0 and late_unit event" in said.err) == (2, True)
    spec_file.write_text(spec_file.read_text().replace("size: 1h", "size: 1h, late_unit: event"))
    assert "valid; pipeline flights" in cli("validate", str(spec_file)).out


def test_validate_warns_where_one_row_can_move_the_frontier_anywhere(
    cli: Cli, spec_file: Path
) -> None:
    """`max_jump` is off unless it is set, and that is said."""
    said = cli("validate", str(spec_file))
    assert (said.exit_code, "warning: max_jump is off (EWR)" in said.out) == (0, True)
    assert len(cli("validate", str(spec_file), "--json").data[0]["warnings"]) == 1
    spec_file.write_text(spec_file.read_text().replace("lag: 1h", "lag: 1h, max_jump: 1d"))
    assert "warning" not in cli("validate", str(spec_file)).out


def test_validate_warns_where_nothing_can_move_the_frontier(cli: Cli, spec_file: Path) -> None:
    """`preset: streaminsight` waits for punctuation rows; without their kind nothing is final."""
    kinds = ", barriers: {kind: carrier, types: [b], punctuation: cti}"
    for preset, source, warned in (
        ("streaminsight", "", True),
        ("streaminsight", kinds, False),
        ("streaminsight", ", punctuation: {every_events: 3}", False),
        ("streaminsight", ", wall_clock: {lag: 1m}", False),
        ("nscldaq", "", False),
    ):
        spec = SPEC.replace(", lag: 1h", source) + f"preset: {preset}\n"
        spec_file.write_text(spec)
        said = cli("validate", str(spec_file))
        assert (said.exit_code, "nothing can move the frontier (EWR)" in said.out) == (0, warned)


def test_validate_reads_the_suites(cli: Cli, spec_file: Path) -> None:
    """A quality section that names no check is found before the checks run."""
    spec_file.write_text(SPEC + "quality: {severity: {late_ration: critical}}\n")
    said = cli("validate", str(spec_file))
    assert (said.exit_code, "late_ration" in said.err) == (2, True)


def test_schema_is_a_schema(cli: Cli, tmp_path: Path) -> None:
    """Editors get plain JSON Schema with the quality limits in it."""
    found = json.loads(cli("schema").out)
    assert found["title"] == "PipelineSpec"
    assert "late_ratio" in found["$defs"]["QualityLimits"]["properties"]
    cli("schema", "--out", "schema.json")
    assert json.loads((tmp_path / "schema.json").read_text()) == found


def test_the_ends_of_time_have_words() -> None:
    """As on the Streams page: before the first row, and when all sources are done."""
    found = [output.format_short_instant(ticks) for ticks in (TICK_MIN, 1_500_000, TICK_MAX)]
    assert found == ["none yet", "1970-01-01T00:00:01Z", "end of time"]


def test_ages_for_people() -> None:
    """Two units are enough."""
    assert output.format_age(0, 3_723_000_000) == "1h2m"
    assert output.format_age(0, 61_500_000) == "1m1s"
    assert output.format_age(5, 5) == "0s"


def test_store_of_the_stack_is_found(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """`--store stack` takes address and keys from the local stack.

    Without it an own store here comes first.
    """
    from tidegate.infra import local_stack

    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("TIDEGATE_STORE", raising=False)
    monkeypatch.setattr(
        local_stack.Stack, "environment", lambda self: {"TIDEGATE_STORE": "s3://bucket"}
    )
    server = SimpleNamespace(alive=True)
    monkeypatch.setattr(local_stack.Stack, "minio_server", lambda self: server)
    (tmp_path / ".tidegate").mkdir()
    (tmp_path / ".tidegate" / "stack.json").write_text("{}")
    assert arguments.resolve_store_url("stack") == "s3://bucket"
    monkeypatch.delenv("TIDEGATE_STORE")
    assert arguments.resolve_store_url(None) == "s3://bucket"
    monkeypatch.delenv("TIDEGATE_STORE")
    LocalStore(tmp_path / ".tidegate" / "store")
    assert arguments.resolve_store_url(None) == ".tidegate/store"
    server.alive = False
    with pytest.raises(TransientError, match="is down"):
        arguments.resolve_store_url("stack")


def test_a_schema_is_proposed_from_an_object(cli: Cli, tmp_path: Path) -> None:
    """As YAML that a spec takes; an object that is something else is said to be."""
    (tmp_path / "a.json").write_text('{"at": "2026-03-01T00:00:00Z", "n": 1, "a: b": "x"}\n')
    said = cli("infer", "a.json").out
    assert YAML(typ="safe").load(said) == {
        "schema": {"at": "timestamp", "n": "long", "a: b": "string"}
    }
    assert cli("infer", "a.json", "--format", "parquet").exit_code == 2
    assert cli("infer", str(tmp_path / "a")).exit_code == 2
    missing = cli("infer", "nope.csv")  # was called poison, with advice about checkpoints
    assert (missing.exit_code, "there is no file" in missing.err) == (2, True)


def test_no_color_and_completion_work_as_on_other_command_lines(
    cli: Cli, log: SlotLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    """NO_COLOR wins over FORCE_COLOR; a shell gets its completion script."""
    monkeypatch.setenv("FORCE_COLOR", "1")
    assert "\x1b[1" in cli("checkpoints", "list", "flights").out
    monkeypatch.setenv("NO_COLOR", "1")
    said = cli("checkpoints", "list", "flights")
    assert "\x1b[3" not in said.out + cli("status", "nowhere").err
    script = subprocess.run(
        [sys.executable, "-m", "tidegate.jobs.cli", "--show-completion", "bash"],
        capture_output=True,
        text=True,
        # Else Typer looks for the shell that runs the tests, which may be one that it does not know.
        env={**os.environ, "_TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION": "1"},
    )
    assert "COMPREPLY" in script.stdout


def test_ctrl_c_ends_with_130(cli: Cli, log: SlotLog, monkeypatch: pytest.MonkeyPatch) -> None:
    """As shells report SIGINT, without a traceback."""

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(arguments, "open_log", interrupt)
    said = cli("status", "flights")
    assert (said.exit_code, "Traceback" in said.err) == (130, False)
