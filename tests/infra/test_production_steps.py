"""docs/deployment.md, security.md and operations.md, tried from a fresh clone.

The wheel, one box as systemd runs it, rights, backup and the way back.
"""

from __future__ import annotations

import json
import re
import shlex
import shutil
import signal
import subprocess
import sys
import sysconfig
import venv
import zipfile
from collections.abc import Mapping
from pathlib import Path

import pytest
from cryptography.fernet import Fernet
from tests.e2e.drivers import wait_for
from tests.e2e.feed import SPEC, write_feed
from tests.wheels import build_wheels

from tidegate.checkpoints.local_store import LocalStore
from tidegate.checkpoints.slot_log import SlotLog

ROOT = Path(__file__).parents[2]
OPENSSL = shutil.which("openssl")
PAGES = "deployment clusters security observability operations landing source-objects output-tables"
PAGE = "\n".join((ROOT / "docs" / f"{name}.md").read_text() for name in PAGES.split())

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.slow,
    pytest.mark.timeout(1800),
    pytest.mark.skipif(not (ROOT / ".git").exists(), reason="not a clone"),
]


class Box:
    """One box, set up as the page says, below a folder instead of `/`."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.clone, self.opt = folder, folder / "clone", folder / "opt" / "tidegate"
        self.pipelines, self.var = (
            folder / "etc" / "tidegate" / "pipelines",
            folder / "var" / "lib" / "tidegate",
        )
        self.store = folder / "bucket"

    def set_up(self) -> None:
        """Clone, build the wheels, install them, lay the spec."""
        run("git", "clone", "--quiet", str(ROOT), str(self.clone))
        if OPENSSL:
            self.compose_variables()
        wheels = build_wheels(self.clone, self.clone / "dist")
        venv.create(self.opt)
        own = Path(
            run(
                str(self.opt / "bin" / "python"),
                "-c",
                "import sysconfig; print(sysconfig.get_path('purelib'))",
            ).strip()
        )
        (own / "locked.pth").write_text(
            sysconfig.get_path("purelib")
        )  # what the lock names is here: it is not fetched twice
        pip = (sys.executable, "-m", "pip", "--python", str(self.opt / "bin" / "python"))
        install = (*pip, "install", "--quiet", "--no-deps", "--no-index", "--ignore-installed")
        run(*install, *wheels)
        self.pipelines.mkdir(parents=True)
        (self.pipelines / "steady.yaml").write_text(SPEC)
        write_feed(self.store, 24)

    def compose_variables(self) -> None:
        """The lines of the page that prepare docker compose, up to docker's own.

        A wheel of before lies there, too.
        """
        folder = self.clone / "infra" / "deploy" / "compose"
        lines = block("docker compose build").partition("docker compose build")[0].splitlines()[3:]
        run("bash", "-euo", "pipefail", "-c", "\n".join(lines), cwd=folder)
        (folder / "tidegate-0-py3-none-any.whl").touch()
        (folder / "requirements.lock").touch()

    def environment(self) -> dict[str, str]:
        """The variables of the example, with a folder for a bucket."""
        lines = (
            (self.clone / "infra" / "deploy" / "systemd" / "environment.example")
            .read_text()
            .splitlines()
        )
        named = dict(line.split("=", 1) for line in lines if line and not line.startswith("#"))
        assert set(named) >= {"TIDEGATE_STORE", "TIDEGATE_S3_ACCESS_KEY", "TIDEGATE_S3_SECRET_KEY"}
        system = {
            "PATH": f"{self.opt / 'bin'}:/usr/local/bin:/usr/bin:/bin",
            "HOME": str(self.folder),
        }
        return {
            **system,
            "TIDEGATE_STORE": str(self.store),
            "TIDEGATE_PIPELINES": f"{self.folder}{named['TIDEGATE_PIPELINES']}",
        }

    def service(self) -> list[str]:
        """The driver's command as the unit has it."""
        unit = (self.clone / "infra" / "deploy" / "systemd" / "tidegate@.service").read_text()
        found = re.search(r"^ExecStart=(.+)$", unit, re.MULTILINE)
        assert found is not None
        command = found[1].replace("%i", "steady").replace(" $TIDEGATE_OPTIONS", "")
        for place in ("/opt", "/etc", "/var"):
            command = command.replace(f"{place}/", f"{self.folder}{place}/")
        return shlex.split(command)

    def start(self) -> subprocess.Popen[bytes]:
        """The driver."""
        (self.var / "steady").mkdir(parents=True, exist_ok=True)
        with (self.folder / "driver.log").open("ab") as log:
            return subprocess.Popen(
                self.service(), env=self.environment(), cwd=self.folder, stdout=log, stderr=log
            )

    def tidegate(self, line: str) -> str:
        """A line of the page."""
        return run(*shlex.split(line), env=self.environment(), cwd=self.folder)


def run(*command: str, env: Mapping[str, str] | None = None, cwd: Path | None = None) -> str:
    """What a command said; fails with all of it when it failed."""
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=600, check=False, env=env, cwd=cwd
    )
    assert done.returncode == 0, f"{shlex.join(command)}\n{done.stdout}\n{done.stderr}"
    return done.stdout


@pytest.fixture(scope="module")
def box(tmp_path_factory: pytest.TempPathFactory) -> Box:
    made = Box(tmp_path_factory.mktemp("box"))
    made.set_up()
    return made


def block(words: str) -> str:
    """The page's shell block with these words."""
    (found,) = (
        block for block in re.findall(r"```sh\n(.*?)```", PAGE, re.DOTALL) if words in block
    )
    return str(found)


def said(pattern: str) -> list[str]:
    """Lines of the page's shell blocks, without their comments."""
    lines = [
        line.partition("   #")[0].strip()
        for block in re.findall(r"```sh\n(.*?)```", PAGE, re.DOTALL)
        for line in block.splitlines()
    ]
    return [line for line in lines if re.match(pattern, line)]


@pytest.mark.skipif(OPENSSL is None, reason="openssl is not installed")
def test_compose_has_its_secrets(box: Box) -> None:
    """The page's lines give every variable that compose asks for a value.

    Git and the wheel leave the file alone.
    """
    folder = box.clone / "infra" / "deploy" / "compose"
    made = dict(line.split("=", 1) for line in (folder / ".env").read_text().splitlines())
    asked = set(re.findall(r"\$\{(\w+):\?", (folder / "compose.yaml").read_text()))
    assert set(made) == asked
    assert all(made.values())
    assert Fernet(made["AIRFLOW_FERNET_KEY"])
    assert run("git", "status", "--short", cwd=box.clone) == ""
    (wheel,) = (box.clone / "dist").glob("tidegate-*.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = {Path(name).name for name in archive.namelist() if "/deploy/compose/" in name}
    assert "compose.yaml" in names
    assert not [name for name in names if name == ".env" or name.endswith((".whl", ".lock"))]


def test_one_box(box: Box) -> None:
    """The service's command runs the wheel, seals, and ends well on SIGTERM.

    With the original gone, its copies go on.
    """
    driver = box.start()
    log = SlotLog(LocalStore(box.store), "steady")
    wait_for(lambda: log.head().slot >= 3, driver, seconds=600)
    driver.send_signal(signal.SIGTERM)
    assert driver.wait(600) == 0, (box.folder / "driver.log").read_text()[-5000:]
    sealed = log.head().slot

    copy = box.folder / "copy"
    for pattern in (
        "steady/timelines/*/slots/*",
        "**/*",
    ):  # the slots first, then everything else; no catalog
        for path in sorted(box.store.glob(pattern)):
            place = copy / path.relative_to(box.store)
            if path.is_file() and not place.exists() and ".tidegate-store" not in path.parts:
                place.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(path, place)
    box.store.rename(box.folder / "gone")  # nothing below may need the original
    box.tidegate(f"tidegate checkpoints verify steady --all --store {copy}")
    with pytest.raises(AssertionError, match="is a copy of"):
        box.tidegate(f"tidegate run steady --quiet --store {copy}")

    shutil.copytree(copy, box.store)  # the way back
    goes_on(box, box.store, sealed)
    before = contents(box.store)
    box.tidegate(f"tidegate checkpoints adopt steady --store {copy}")
    goes_on(box, copy, sealed)
    assert contents(box.store) == before


def goes_on(box: Box, store: Path, sealed: int) -> None:
    """A driver comes to the end of the input, and the tables are exact.

    The bundle can be made by the pipeline's name.
    """
    box.tidegate(f"tidegate run steady --quiet --store {store}")
    assert SlotLog(LocalStore(store), "steady").head().slot > sealed
    box.tidegate(f"tidegate check steady --store {store}")
    box.tidegate(f"tidegate support-bundle steady --store {store}")


def contents(store: Path) -> dict[str, bytes]:
    """What lies in a store."""
    return {
        str(path.relative_to(store)): path.read_bytes()
        for path in store.rglob("*")
        if path.is_file()
    }


def test_rights(box: Box) -> None:
    """Each line that makes a policy makes one."""
    lines = said(r"python -m tidegate\.infra\.policies")
    assert len(lines) == 5
    for line in lines:
        run("bash", "-euo", "pipefail", "-c", line, env=box.environment(), cwd=box.folder)
        assert json.loads((box.folder / line.rpartition("> ")[2]).read_text())["Statement"]


def test_commands_exist(box: Box) -> None:
    """Every `tidegate` command that the page names is there, with the options it names."""
    named = re.findall(r"`(tidegate [a-z][^`]*)`", PAGE) + said("tidegate ")
    helps: dict[str, str] = {}
    for line in named:
        words = shlex.split(line)
        commands = [
            w for w in words[1:3] if re.fullmatch(r"[a-z-]+", w) and w not in ("flights", "ticks")
        ]
        asked = shlex.join(["tidegate", *commands, "--help"])
        if asked not in helps:
            helps[asked] = box.tidegate(asked)
        for option in (w for w in words if w.startswith("--")):
            assert option in helps[asked], line
