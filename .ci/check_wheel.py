"""Check the members of the two wheels against the checkout.

Every file of the five packages, once, as a file, and nothing else. The wheel of the kernel has what
src/tidegate/kernel.toml names, the other one has the rest.
"""

from __future__ import annotations

import stat
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

_PACKAGES = ("checkpoints", "expectations", "infra", "jobs", "operators")
_DAG_FILES = {"dags/tidegate_dags.py", "dags/tidegate_specs.py"}
_METADATA = {"METADATA", "RECORD", "WHEEL"}


def main(wheels: list[Path]) -> int:
    """Print every difference; return the exit code."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "--", *_PACKAGES]
    listed = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    files = {name for name in listed if Path(name).is_file()}
    files = {name for name in files if not name.startswith("infra/kernel/")}
    files |= _DAG_FILES | {path.name for path in Path("src/tidegate").iterdir() if path.is_file()}
    named = tomllib.loads(Path("src/tidegate/kernel.toml").read_text("utf-8"))["files"]
    of_kernel = {name for name in files if any(Path(name).is_relative_to(own) for own in named)}
    problems = []
    for wheel in wheels:
        is_kernel = wheel.name.startswith("tidegate_kernel-")
        found = _check_wheel(wheel, of_kernel if is_kernel else files - of_kernel)
        problems += [f"{wheel.name}: {problem}" for problem in found]
    if len(wheels) != 2:
        problems.append(f"{len(wheels)} wheels instead of two")
    for problem in problems:
        print(problem)
    print(f"{len(of_kernel)} of {len(files)} files are the kernel's, {len(problems)} problem(s)")
    return 1 if problems else 0


def _check_wheel(wheel: Path, files: set[str]) -> list[str]:
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        links = [
            item.filename for item in archive.infolist() if stat.S_ISLNK(item.external_attr >> 16)
        ]
    code = {name for name in names if ".dist-info/" not in name}
    metadata = {name.rpartition("/")[2] for name in set(names) - code}
    expected = {f"tidegate/{name}" for name in files}
    return [
        *(f"missing: {name}" for name in sorted(expected - code)),
        *(f"unexpected: {name}" for name in sorted(code - expected)),
        *(f"a link: {name}" for name in links),
        *(f"missing metadata: {name}" for name in sorted(_METADATA - metadata)),
        *(["members appear twice"] if len(names) != len(set(names)) else []),
    ]


if __name__ == "__main__":
    sys.exit(main([Path(name) for name in sys.argv[1:]]))
