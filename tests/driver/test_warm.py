"""The class archive: which one fits, when it is used, when it is made."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tidegate.errors import ConfigurationError, TransientError
from tidegate.jobs.driver import class_archive_build as warming
from tidegate.jobs.spark.spark_session import (
    ARCHIVE_DUMP_VARIABLE,
    build_archive_options,
    locate_class_archive,
)


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """An environment with a Java of its own, an empty cache and no archive."""
    java = tmp_path / "java" / "bin" / "java"
    java.parent.mkdir(parents=True)
    java.write_text("#!/bin/sh\n")
    found = {
        "JAVA_HOME": str(tmp_path / "java"),
        "XDG_CACHE_HOME": str(tmp_path / "cache"),
        "PATH": "",
    }
    for key, value in found.items():
        monkeypatch.setenv(key, value)
    return found


def test_an_archive_fits_one_java_and_one_spark(
    machine: dict[str, str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Another Java or another Spark means another file; without a Java there is none."""
    mine = locate_class_archive()
    assert mine is not None
    assert mine == locate_class_archive()
    with monkeypatch.context() as other:
        other.setenv("SPARK_HOME", "/opt/spark")
        assert mine != locate_class_archive()
    Path(machine["JAVA_HOME"], "bin", "java").write_text("#!/bin/sh\n# updated\n")
    assert mine != locate_class_archive()
    monkeypatch.setenv("JAVA_HOME", str(tmp_path / "nowhere"))
    assert locate_class_archive() is None


def test_the_jvm_gets_an_archive_only_if_it_exists(
    machine: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """No archive, no option; with one it is shared, quietly; while one is made it is written."""
    archive = locate_class_archive()
    assert archive is not None
    assert build_archive_options() == ""
    archive.parent.mkdir(parents=True)
    archive.touch()
    assert build_archive_options().startswith(f'"-XX:SharedArchiveFile={archive}" -Xshare:auto ')
    monkeypatch.setenv(ARCHIVE_DUMP_VARIABLE, "/some/where.jsa")
    assert build_archive_options().startswith('"-XX:ArchiveClassesAtExit=/some/where.jsa" ')


def test_it_is_made_once(machine: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    """The first call makes it, the second finds it, `again` replaces it.

    A failed run leaves nothing and says why.
    """
    runs = []

    def run(arguments: list[str], environment: dict[str, str]) -> str:
        runs.append(arguments)
        Path(environment[ARCHIVE_DUMP_VARIABLE]).write_text("classes")
        return ""

    monkeypatch.setattr(warming, "_run_warmup_driver", run)
    archive, made = warming.build_class_archive()
    assert (made, archive.read_text()) == (True, "classes")
    assert warming.build_class_archive() == (archive, False)
    assert warming.build_class_archive(again=True) == (archive, True)
    assert len(runs) == 2
    assert os.listdir(archive.parent) == [archive.name]

    archive.unlink()
    monkeypatch.setattr(
        warming, "_run_warmup_driver", lambda _arguments, _environment: "the JVM said no"
    )
    with pytest.raises(TransientError, match="the JVM said no"):
        warming.build_class_archive()
    assert os.listdir(archive.parent) == []


def test_a_run_that_takes_too_long_is_a_failure_that_is_tried_again(
    machine: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its last lines are in the message."""

    def hang(command: list[str], *, timeout: float, **_: Any) -> None:
        raise subprocess.TimeoutExpired(command, timeout, output=b"the JVM waits")

    monkeypatch.setattr(subprocess, "run", hang)
    with pytest.raises(TransientError, match="the JVM waits\nended after 600 s"):
        warming.build_class_archive()


def test_without_java_it_says_so(machine: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    """The advice is to install one."""
    monkeypatch.setenv("JAVA_HOME", "/nowhere")
    with pytest.raises(ConfigurationError, match="no Java"):
        warming.build_class_archive()
