"""Takes the files of the wheel from a folder that is not below this one."""

import tomllib
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class KernelFiles(BuildHookInterface):  # type: ignore[type-arg]
    """Adds the files that `kernel.toml` names."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Name them, unless the package is installed as a link to the checkout."""
        if version == "editable":
            return
        # A source distribution has them beside this file.
        folders = (Path(self.root, "tidegate"), Path(self.root, "../../src/tidegate"))
        package = next(folder for folder in folders if folder.is_dir())
        for name in tomllib.loads((package / "kernel.toml").read_text("utf-8"))["files"]:
            build_data["force_include"][str(package / name)] = f"tidegate/{name}"
