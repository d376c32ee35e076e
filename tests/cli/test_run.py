from __future__ import annotations

from collections.abc import Callable
from datetime import date
from pathlib import Path
from typing import Any

import pytest
from tests.cli.conftest import Cli

from tidegate.infra.local_stack import Stack, StackStatus
from tidegate.jobs.driver import pipeline_run
from tidegate.jobs.spec.pipeline import PipelineSpec


def test_run_hands_everything_to_the_driver(
    cli: Cli, spec_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Options become run options, the driver's exit code becomes the command's."""
    calls: list[tuple[PipelineSpec, pipeline_run.RunOptions]] = []

    def run_pipeline(spec: PipelineSpec, options: pipeline_run.RunOptions) -> int:
        calls.append((spec, options))
        return 3

    monkeypatch.setattr(pipeline_run, "run_pipeline", run_pipeline)
    said = cli(
        "run",
        "flights.yaml",
        "--until-idle",
        "5",
        "--epochs",
        "7",
        "--recover-to",
        "latest_healthy",
        "--standby",
    )
    assert said.exit_code == 3
    ((spec, options),) = calls
    assert (spec.name, options.store_url, options.recover_to, options.standby) == (
        "flights",
        ".tidegate/store",
        "latest_healthy",
        True,
    )
    assert (options.until.idle, options.until.epochs) == (5.0, 7)


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
    """What is given is handed on, the rest has its defaults, and a mistake is told."""
    from tidegate.infra import demo

    given: list[tuple[object, ...]] = []

    def run_demo(*arguments: object, keep: bool) -> int:
        given.append((*arguments, keep))
        return 0

    monkeypatch.setattr(demo, "run_demo", run_demo)
    assert cli("demo", "--days", "3", "--pace", "0.5", "--keep").exit_code == 0
    assert given == [(date(2013, 1, 6), 3, 0.5, Path.cwd() / ".tidegate" / "demo", True)]
    assert cli("demo", "--other", "x").exit_code == 2
