"""Check a wheel's members against the checkout.

Every file of the five packages, once, as a file, and nothing else.
"""

from __future__ import annotations

import stat
import subprocess
import sys
import zipfile
from pathlib import Path

_PACKAGES = ("checkpoints", "expectations", "infra", "jobs", "operators")
_ROOT_FILES = (
    "__init__.py",
    "errors.py",
    "job.py",
    "json_types.py",
    "secret_masks.py",
    "time_units.py",
    "py.typed",
)
_DAG_FILES = ("dags/tidegate_dags.py", "dags/tidegate_specs.py")
_ALSO = {f"tidegate/{name}" for name in (*_ROOT_FILES, *_DAG_FILES)}
_METADATA = {"METADATA", "RECORD", "WHEEL", "entry_points.txt"}


def main(wheel: Path) -> int:
    """Print every difference; return the exit code."""
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        links = [
            item.filename for item in archive.infolist() if stat.S_ISLNK(item.external_attr >> 16)
        ]
    code = {name for name in names if ".dist-info/" not in name}
    metadata = {name.rpartition("/")[2] for name in set(names) - code}
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "--", *_PACKAGES]
    listed = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    expected = _ALSO | {f"tidegate/{name}" for name in listed if Path(name).is_file()}
    problems = [
        *(f"missing: {name}" for name in sorted(expected - code)),
        *(f"unexpected: {name}" for name in sorted(code - expected)),
        *(f"a link: {name}" for name in links),
        *(f"missing metadata: {name}" for name in sorted(_METADATA - metadata)),
        *(["members appear twice"] if len(names) != len(set(names)) else []),
    ]
    for problem in problems:
        print(problem)
    print(f"{wheel.name}: {len(code)} files, {len(problems)} problem(s)")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
