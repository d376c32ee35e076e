"""Check offline that requirements.lock fits pyproject.toml and is what is installed.

Resolving again is `make lock`; this only proves that no one changed one file and forgot the other:
every requirement is pinned to a version it allows, every pin has hashes and none an address, and
the environment holds the pinned versions. What the kernel requires, tidegate requires alike.
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
    project, kernel = _list_requirements("."), _list_requirements("infra/kernel")
    pins = [match.groupdict() for line in text.splitlines() if (match := _PIN.match(line))]
    locked = {canonicalize_name(str(pin["name"])): str(pin["version"]) for pin in pins}
    problems = [*_form(text, len(pins)), *_installed(pins)]
    problems += _requirements([*project.values(), *kernel.values()], locked)
    for name in project.keys() & kernel.keys():
        if project[name] != kernel[name]:
            problems.append(f"tidegate wants {project[name]}, its kernel wants {kernel[name]}")
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


def _list_requirements(folder: str) -> dict[str, str]:
    """The requirements of a project by name; those of tidegate's own kernel are not locked."""
    file = tomllib.loads(Path(folder, "pyproject.toml").read_text(encoding="utf-8"))
    extras = {**file["project"]["optional-dependencies"], **file.get("dependency-groups", {})}
    texts = [*file["project"]["dependencies"], *(text for own in extras.values() for text in own)]
    named = {canonicalize_name(Requirement(text).name): text for text in texts}
    return {name: text for name, text in named.items() if name != "tidegate-kernel"}


def _requirements(texts: list[str], locked: dict[str, str]) -> list[str]:
    problems = []
    for text in texts:
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
