"""Check offline that requirements.lock fits pyproject.toml and is what is installed.

Resolving again is `make lock`; this only proves that no one changed one file and forgot the other:
every requirement is pinned to a version it allows, every pin has hashes and none an address, and
the environment holds the pinned versions.
"""

from __future__ import annotations

import re
import sys
import tomllib
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from packaging.markers import Marker
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

_PIN = re.compile(r"^(?P<name>[A-Za-z0-9._-]+)==(?P<version>\S+)(?: ; (?P<marker>.+?))? \\$")


def main() -> int:
    """Print every problem; return the exit code."""
    text = Path("requirements.lock").read_text(encoding="utf-8")
    project = tomllib.loads(Path("pyproject.toml").read_text(encoding="utf-8"))
    pins = [match.groupdict() for line in text.splitlines() if (match := _PIN.match(line))]
    locked = {canonicalize_name(str(pin["name"])): str(pin["version"]) for pin in pins}
    problems = [*_form(text, len(pins)), *_requirements(project, locked), *_installed(pins)]
    for problem in problems:
        print(problem)
    print(
        f"{len(pins)} pins, {len(problems)} problem(s)" + ("; run: make lock" if problems else "")
    )
    return 1 if problems else 0


def _form(text: str, pins: int) -> list[str]:
    statements = re.split(r"\n(?=\S)", re.sub(r"^\s*#.*\n", "", text, flags=re.MULTILINE))
    unhashed = [
        statement.split()[0]
        for statement in statements
        if statement.strip() and "--hash=sha256:" not in statement
    ]
    problems = [f"{name} has no hash" for name in unhashed]
    if re.search(r"https?://|--index|--find-links|\bfile:", text):
        problems.append("the lock names an address")
    return problems if pins else [*problems, "the lock holds no pins"]


def _requirements(project: dict[str, object], locked: dict[str, str]) -> list[str]:
    table: dict[str, list[str]] = (
        project["project"]
        | project["project"]["optional-dependencies"]
        | project["dependency-groups"]
    )  # type: ignore[operator,index]
    problems = []
    for text in [
        *table["dependencies"],
        *table["demo"],
        *table["kafka"],
        *table["postgres"],
        *table["dev"],
    ]:
        wanted = Requirement(text)
        pinned = locked.get(canonicalize_name(wanted.name))
        if pinned is None or not wanted.specifier.contains(pinned, prereleases=True):
            problems.append(f"pyproject.toml wants {text}, the lock has {pinned}")
    return problems


def _installed(pins: list[dict[str, str | None]]) -> list[str]:
    problems = []
    for pin in pins:
        if pin["marker"] and not Marker(pin["marker"]).evaluate():
            continue
        try:
            found = version(str(pin["name"]))
        except PackageNotFoundError:
            found = "nothing"
        if found != pin["version"]:
            problems.append(f"{pin['name']} is pinned to {pin['version']}, installed is {found}")
    return problems


if __name__ == "__main__":
    sys.exit(main())
