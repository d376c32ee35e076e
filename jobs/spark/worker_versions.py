"""Refuses Python workers whose packages are not those of the driver.

Two versions of DuckDB or Arrow may compute or write a row differently.
"""

import json
import socket
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from typing import Final

from tidegate import __version__
from tidegate.errors import TidegateError

from .errors import OTHER_VERSIONS

VERSIONS_VARIABLE: Final = "TIDEGATE_DRIVER_VERSIONS"
"""What `describe_versions` said in the driver, in the environment of workers."""
_PACKAGES: Final = ("duckdb", "fastavro", "numpy", "protobuf", "pyarrow")
"""What reads and computes rows, besides tidegate. PySpark itself requires its own version."""


@cache
def describe_versions() -> str:
    """Return the versions of this process, as `find_other_version` takes them."""
    found = {"tidegate": __version__}
    for name in _PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = "none"
    return json.dumps(found)


def find_other_version(driver: str | None) -> TidegateError | None:
    """Return the error for a package of which this worker has another version than the driver.

    None for the driver's versions: they are not known, so nothing is compared.
    """
    mine = json.loads(describe_versions())
    for package, wanted in json.loads(driver or "{}").items():
        if (found := mine.get(package, "none")) != wanted:
            host = socket.gethostname()
            return OTHER_VERSIONS(host=host, package=package, found=found, wanted=wanted)
    return None
