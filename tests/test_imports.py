"""Every module can be imported, with each supported Python and from the wheel."""

from __future__ import annotations

import subprocess
import sys

_IMPORT_ALL = """
import importlib, pkgutil, tidegate
found = [module.name for module in pkgutil.walk_packages(tidegate.__path__, "tidegate.")]
for name in found:
    name.endswith("__main__") or importlib.import_module(name)
print(len(found))
"""


def test_every_module_can_be_imported() -> None:
    """None is missing in the wheel, or uses what another Python lacks.

    In a process of its own: the other tests must not find modules loaded that they do not import.
    """
    done = subprocess.run(
        [sys.executable, "-c", _IMPORT_ALL], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert int(done.stdout.split()[-1]) > 200
