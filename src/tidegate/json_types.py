"""The type of the JSON objects that tidegate writes, reads and answers with, and its own data."""

import tomllib
from collections.abc import Mapping
from importlib.resources import files
from typing import Any

JsonObject = dict[str, Any]
"""What `json.loads` returns for an object: text to anything that JSON can express."""

JsonView = Mapping[str, Any]
"""The same, for those who only read it."""


def read_data_file(package: str | None, name: str) -> JsonObject:
    """Return the content of a TOML file that lies beside the modules of a package."""
    # TOML, because every command reads some, and the standard library parses it.
    return tomllib.loads(files(package or "").joinpath(name).read_text("utf-8"))
