from __future__ import annotations

import errno
import os
import stat
import tempfile
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from datetime import date
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import structlog
from tests.cli.conftest import Cli, seal

from tidegate.checkpoints.checkpoint_specs import write_spec
from tidegate.checkpoints.local_store import LocalStore
from tidegate.checkpoints.manifest import Counters
from tidegate.checkpoints.pipeline_identity import ensure_identity
from tidegate.checkpoints.row_counts import name_late_counts
from tidegate.checkpoints.slot_log import SlotLog
from tidegate.infra.local_stack import Stack, StackStatus
from tidegate.jobs.cli import arguments, output
from tidegate.jobs.driver import pipeline_run
from tidegate.jobs.driver.epoch_loop import RunOutcome
from tidegate.jobs.driver.error_classification import detect_full_disk
from tidegate.jobs.driver.pipeline_run import RunOptions
from tidegate.jobs.engine.epoch_engine import EpochReport
from tidegate.jobs.sources.errors import OBJECT_VANISHED
from tidegate.jobs.spec.loader import load_spec
from tidegate.jobs.spec.pipeline import PipelineSpec

Run = Callable[[PipelineSpec, RunOptions], RunOutcome]


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Callable[[Run], None]]:
    """Replace the driver by a function; log files are made in the test's folder."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    yield lambda run: monkeypatch.setattr(pipeline_run, "run_until_end", run)
    structlog.reset_defaults()


def test_run_hands_everything_to_the_driver(
    cli: Cli, spec_file: Path, driver: Callable[[Run], None]
) -> None:
    """Options become run options."""
    calls: list[tuple[PipelineSpec, RunOptions]] = []

    def run(spec: PipelineSpec, options: RunOptions) -> RunOutcome:
        calls.append((spec, options))
        return RunOutcome("stopped", "7 epochs were asked for")

    driver(run)
    limits = ["--until-idle", "5", "--epochs", "7", "--until-end"]
    said = cli("run", "flights.yaml", *limits, "--recover-to", "latest_healthy", "--standby")
    assert said.exit_code == 0
    first, second = said.out.splitlines()
    assert first == "flights stopped: 7 epochs were asked for"
    assert second.startswith("no row was read; no object was found in inbox/EWR")
    ((spec, options),) = calls
    assert (spec.name, options.store_url, options.recover_to, options.standby) == (
        "flights",
        ".tidegate/store",
        "latest_healthy",
        True,
    )
    assert (options.until.idle, options.until.epochs, options.ends_input) == (5.0, 7, True)


def test_a_failed_run_prints_the_error_and_names_its_log(
    cli: Cli, spec_file: Path, tmp_path: Path, driver: Callable[[Run], None]
) -> None:
    """An error of a run has the form and the exit code of every other command's error."""

    def run(spec: PipelineSpec, _options: RunOptions) -> RunOutcome:
        raise OBJECT_VANISHED(pipeline=spec.name, uri="a.parquet", source="EWR")

    driver(run)
    said = cli("run", "flights.yaml")
    (log,) = tmp_path.glob("tidegate-flights-*.log")
    lines = said.err.splitlines()
    assert (said.exit_code, lines[0]) == (3, f"log: {log}")
    assert stat.S_IMODE(log.stat().st_mode) == 0o600
    assert [line.split(":")[0] for line in lines[1:]] == ["transient error", "kept", "next"]


def test_a_run_writes_its_log_and_that_of_its_children_to_the_store(
    cli: Cli, spec_file: Path, log: SlotLog, tmp_path: Path, driver: Callable[[Run], None]
) -> None:
    """The terminal gets only warnings; `tidegate logs` shows the rest; no file stays behind."""

    def run(_spec: PipelineSpec, _options: RunOptions) -> RunOutcome:
        os.write(2, b"noise of a JVM\n")
        structlog.get_logger().info("started", epoch=1)
        structlog.get_logger().warning("bucket_rule", what="versioning is off")
        return RunOutcome("stopped", "asked for")

    driver(run)
    said = cli("run", "flights.yaml")
    assert said.err == "warning: bucket_rule (what: versioning is off)\n"
    shown = cli("logs", "flights").out
    assert [word in shown for word in ("noise of a JVM", "started", "bucket_rule")] == [True] * 3
    assert list(tmp_path.glob("tidegate-flights-*.log")) == []


@pytest.mark.parametrize("quiet", [True, False])
def test_a_run_says_how_many_rows_wait_and_what_to_do(
    cli: Cli, spec_file: Path, log: SlotLog, driver: Callable[[Run], None], quiet: bool
) -> None:
    """Rows in the order buffer look lost otherwise."""
    sealed = log.head().record
    assert sealed is not None
    waiting = sealed.model_copy(update={"counters": Counters(read=10, released=4, retained=6)})
    decision = SimpleNamespace(barriers=(), frontier_after=0)

    def run(_spec: PipelineSpec, options: RunOptions) -> RunOutcome:
        report = EpochReport(sealed.id, 10, False, cast(Any, decision), manifest=waiting)
        options.on_epoch(report, 0.5)
        return RunOutcome("stopped", "no row for 5 s")

    driver(run)
    said = cli("run", "flights.yaml", *(["--quiet"] if quiet else []))
    lines = ["6 rows wait" in said.out, "--until-end" in said.out, str(sealed.id) in said.out]
    assert (lines, said.out == "") == ([not quiet] * 3, quiet)


def test_the_line_of_an_epoch_tells_what_was_set_aside(
    cli: Cli, spec_file: Path, log: SlotLog, driver: Callable[[Run], None]
) -> None:
    """Dead letters and whole objects are in it, so that 30 rows read and 15 released are clear."""
    sealed = log.head().record
    assert sealed is not None
    counts = {"read": 30, "released": 15, "dead_lettered": 12, "dead_objects": 1, "retained": 3}
    report = sealed.model_copy(update={"notes": {"epoch": counts}})
    decision = SimpleNamespace(barriers=(), frontier_after=0)

    def run(_spec: PipelineSpec, options: RunOptions) -> RunOutcome:
        options.on_epoch(EpochReport(sealed.id, 30, False, cast(Any, decision), report), 0.5)
        return RunOutcome("stopped", "asked for")

    driver(run)
    out = cli("run", "flights.yaml").out
    assert "read 30  released 15  dead 12  dead objects 1  frontier" in out


def test_the_end_of_a_run_names_what_is_paused(
    cli: Cli, spec_file: Path, log: SlotLog, driver: Callable[[Run], None]
) -> None:
    """A run ends well although a reducer cannot go on; that must not look complete."""
    sealed = log.head().record
    assert sealed is not None
    states = {"odd": {"status": "paused"}, "even": {"status": "live"}}
    report = sealed.model_copy(update={"notes": {"streams": {"attachments": states}}})
    decision = SimpleNamespace(barriers=(), frontier_after=0)

    def run(_spec: PipelineSpec, options: RunOptions) -> RunOutcome:
        options.on_epoch(EpochReport(sealed.id, 10, False, cast(Any, decision), report), 0.5)
        return RunOutcome("finished", "every source is bounded and read to its end")

    driver(run)
    out = cli("run", "flights.yaml").out
    assert ("odd is paused at a row" in out, "even is" in out) == (True, False)


def test_the_end_of_a_run_tells_of_rows_that_only_a_window_missed(
    cli: Cli, spec_file: Path, log: SlotLog, driver: Callable[[Run], None]
) -> None:
    """The row equation is that of the events, and says 0 late for them."""
    sealed = log.head().record
    assert sealed is not None
    late = name_late_counts("hourly", "closed")
    per_source = {"EWR": {"read": 10, "released": 10} | dict.fromkeys(late, 3) | {"late_rows": 3}}
    counters = Counters(read=10, released=10, per_source=per_source)
    report = sealed.model_copy(update={"counters": counters})
    decision = SimpleNamespace(barriers=(), frontier_after=0)

    def run(_spec: PipelineSpec, options: RunOptions) -> RunOutcome:
        options.on_epoch(EpochReport(sealed.id, 10, False, cast(Any, decision), report), 0.5)
        return RunOutcome("stopped", "asked for")

    driver(run)
    assert "late: 3 rows (30.0%): 3 for hourly" in cli("run", "flights.yaml").out


def test_the_end_of_a_run_tells_why_it_could_not_go_on(
    cli: Cli, spec_file: Path, driver: Callable[[Run], None]
) -> None:
    """Without an epoch, nothing is known of the objects: none is said to be missing."""
    full = detect_full_disk("flights", OSError(errno.ENOSPC, "No space left on device", "/s"))
    driver(lambda _spec, _options: RunOutcome("stopped", "asked for", full))
    said = cli("run", "flights.yaml").out
    assert ("no space left" in said, "no object was found" in said) == (True, False)


def test_the_end_of_a_run_names_objects_that_were_set_aside(
    cli: Cli, spec_file: Path, log: SlotLog, driver: Callable[[Run], None]
) -> None:
    """They were found, although none of their rows was read."""
    sealed = log.head().record
    assert sealed is not None
    per_source = {"EWR": {"dead_objects": 2}}
    counters = Counters(read=0, released=0, per_source=per_source)
    report = sealed.model_copy(update={"counters": counters})
    decision = SimpleNamespace(barriers=(), frontier_after=0)

    def run(_spec: PipelineSpec, options: RunOptions) -> RunOutcome:
        options.on_epoch(EpochReport(sealed.id, 0, False, cast(Any, decision), report), 0.5)
        return RunOutcome("finished", "all is read")

    driver(run)
    assert "no row was read: 2 objects were set aside" in cli("run", "flights.yaml").out


def test_until_end_refuses_topics(cli: Cli, tmp_path: Path) -> None:
    """A topic has no end to wait for."""
    topic = (
        "{kind: kafka, kafka: {topic: t, servers: 'h:1', payload: json}, schema: {at: timestamp},"
        " event_time: at, lag: 1h}"
    )
    (tmp_path / "k.yaml").write_text(
        f"apiVersion: tidegate/v1\nname: k\nsources:\n  web: {topic}\n"
    )
    said = cli("run", "k.yaml", "--until-end")
    assert (said.exit_code, "have no end: web" in said.err) == (2, True), said.err


def test_a_name_finds_the_spec_that_sealed_the_newest_epoch(
    cli: Cli, store: LocalStore, spec_file: Path
) -> None:
    """Without a file of this name, the store's copy of the spec serves."""
    spec = load_spec(spec_file)
    spec_file.unlink()
    write_spec(store, spec)
    ensure_identity(store, "flights")
    seal(SlotLog(store, "flights"), spec_digest=spec.digest())
    found, log = arguments.open_spec_and_log("flights", None)
    assert (found, log.pipeline) == (spec, "flights")


def test_run_of_a_bad_spec_starts_nothing(cli: Cli, tmp_path: Path) -> None:
    """The spec is read before the store is touched."""
    (tmp_path / "bad.yaml").write_text("name: [")
    said = cli("run", "bad.yaml")
    assert (said.exit_code, "not valid YAML" in said.err) == (2, True)
    assert not (tmp_path / ".tidegate").exists()


@pytest.fixture
def stack(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """A stack that only notes what is asked of it."""
    asked: list[str] = []

    def up(self: Stack, progress: Callable[[str], None]) -> StackStatus:
        asked.append(f"up {self.home}")
        progress("[  0.1 s] MinIO is up")
        return StackStatus(
            {"minio": "running"},
            True,
            "http://127.0.0.1:1",
            "http://127.0.0.1:2",
            self.credentials_file,
        )

    monkeypatch.setattr(Stack, "up", up)
    monkeypatch.setattr(Stack, "down", lambda self, progress: asked.append(f"down {self.home}"))
    return asked


def test_up_says_where_everything_is(cli: Cli, stack: list[str], tmp_path: Path) -> None:
    """Addresses and the file with the logins, never the logins; progress goes to standard error."""
    said = cli("up")
    assert "http://127.0.0.1:1" in said.out
    assert "credentials.json" in said.out
    assert "MinIO is up" in said.err
    data: dict[str, Any] = cli("up", "--json").data
    assert data["healthy"] is True


def test_stack_home_comes_from_option_then_environment(
    cli: Cli, stack: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two stacks on one machine are two folders."""
    cli("down")
    monkeypatch.setenv("TIDEGATE_HOME", str(tmp_path / "env"))
    cli("down")
    cli("down", "--home", str(tmp_path / "own"))
    assert stack == [
        f"down {tmp_path / '.tidegate'}",
        f"down {tmp_path / 'env'}",
        f"down {tmp_path / 'own'}",
    ]


def test_demo_gets_its_options(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    """The command passes on what is given, uses defaults for the rest, and reports a mistake."""
    from tidegate.infra import demo

    given: list[tuple[object, ...]] = []

    def run_demo(*arguments: object, keep: bool) -> nullcontext[SimpleNamespace]:
        given.append((*arguments, keep))
        return nullcontext(SimpleNamespace(is_good=True))

    shown: list[str] = []
    monkeypatch.setattr(demo, "run_demo", run_demo)
    monkeypatch.setattr(output, "print_text", lambda template, **_: shown.append(template))
    assert cli("demo", "--days", "3", "--pace", "0.5", "--keep").exit_code == 0
    assert shown == ["demo"]
    assert given == [(date(2013, 1, 6), 3, 0.5, Path.cwd() / ".tidegate" / "demo", True)]
    assert cli("demo", "--other", "x").exit_code == 2
