"""Run the unit tests that a change against main concerns: the last step of `make check`.

These are the tests of the modules that changed, and of the modules that import one of them
directly. A data file, such as a template, counts as a change of all modules of its folder.
"""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Collection, Iterable, Mapping
from functools import cache
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).parents[2]
_PACKAGE: Final = "tidegate"
_SOURCE: Final = "src/tidegate/"
_ROOMS: Final = ("checkpoints", "expectations", "infra", "jobs", "operators")
_MAIN: Final = ("main", "origin/main")
_NO_TESTS: Final = 5  # exit status of pytest: a file may hold only tests of other tiers


def list_changed_files(root: Path) -> list[str]:
    """Files that differ from where this branch left main, with those that git does not know yet."""
    start = next(
        (base for main in _MAIN if (base := _ask_git(root, "merge-base", "HEAD", main))), "HEAD"
    )
    changed = _ask_git(root, "diff", "--name-only", start)
    unknown = _ask_git(root, "ls-files", "--others", "--exclude-standard")
    return sorted({*changed.splitlines(), *unknown.splitlines()})


def _ask_git(root: Path, *arguments: str) -> str:
    command = ["git", *arguments]
    return subprocess.run(
        command, cwd=root, capture_output=True, text=True, check=False
    ).stdout.strip()


def name_modules(file: str, modules: Collection[str]) -> set[str]:
    """The modules of the product that a change of a file changes.

    Args:
        file: path from the root of the repository.
        modules: all modules of the product.
    """
    inner = file.removeprefix(_SOURCE)
    if inner == file and file.partition("/")[0] not in _ROOMS:
        return set()
    if file.endswith(".py"):
        path = Path(_PACKAGE, inner).with_suffix("")
        return {".".join(part for part in path.parts if part != "__init__")}
    # The nearest package above: templates and suites have folders of their own.
    for folder in Path(_PACKAGE, inner).parents:
        package = ".".join(folder.parts)
        if package in modules and package != _PACKAGE:
            return {name for name in modules if name.rpartition(".")[0] == package} | {package}
    return set()


def find_test_files(
    changed: Iterable[str], importers: Mapping[str, Collection[str]], root: Path
) -> list[str]:
    """The test files that a change concerns.

    Args:
        changed: paths from the root of the repository; some of them may be gone.
        importers: each module of the product with those that import it directly.
        root: the repository.
    """
    files = list(changed)
    modules = {name for file in files for name in name_modules(file, importers)}
    concerned = modules.union(*(importers.get(name, ()) for name in modules))
    concerned |= {_name_test_module(file) for file in files if file.startswith("tests/")}
    folders = [
        Path(file).parent
        for file in files
        if file.startswith("tests/") and (not file.endswith(".py") or file.endswith("/conftest.py"))
    ]
    imports = {
        str(path.relative_to(root)): list_imports(path)
        for path in sorted(root.glob("tests/**/*.py"))
    }
    concerned |= _find_helpers(concerned, imports)
    return [
        file
        for file, names in imports.items()
        if Path(file).name.startswith("test_")
        and (
            names & concerned
            or _name_test_module(file) in concerned
            or any(folder in Path(file).parents for folder in folders)
        )
    ]


def _find_helpers(concerned: set[str], imports: Mapping[str, frozenset[str]]) -> set[str]:
    """Modules that tests share and that import what a change concerns, over any number of steps."""
    found = set(concerned)
    while True:
        more = {
            _name_test_module(file)
            for file, names in imports.items()
            if names & found and not Path(file).name.startswith("test_")
        } - found
        if not more:
            return found
        found |= more


def _name_test_module(file: str) -> str:
    return ".".join(Path(file).with_suffix("").parts).removesuffix(".__init__")


@cache
def list_imports(path: Path) -> frozenset[str]:
    """Dotted names that a file imports, as far as they may be modules."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return frozenset(found)


def read_importers() -> dict[str, set[str]]:
    """Each module of the product with those that import it directly."""
    import grimp

    graph = grimp.build_graph(_PACKAGE)
    return {name: graph.find_modules_that_directly_import(name) for name in graph.modules}


def main() -> int:
    """Run the tests; return pytest's exit code."""
    changed = list_changed_files(ROOT)
    files = find_test_files(changed, read_importers(), ROOT) if changed else []
    print(f"check: {len(changed)} changed files, {len(files)} test files", flush=True)
    if not files:
        return 0
    options = ["-n", "2", "--dist", "loadgroup", "-q", "-m", "unit and not slow"]
    command = [sys.executable, "-m", "pytest", *options, *files]
    status = subprocess.run(command, cwd=ROOT, check=False).returncode
    return 0 if status == _NO_TESTS else status


if __name__ == "__main__":
    sys.exit(main())
