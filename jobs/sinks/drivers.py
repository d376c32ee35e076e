"""Client libraries that only some sinks need, and that an extra of the package brings."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from tidegate.jobs.spec.errors import ConfigurationError

__all__ = ["import_client_library"]


def import_client_library(module: str, *, of: str, package: str, extra: str) -> Any:
    """The module, imported when a sink first needs it.

    Args:
        module: its import name.
        of: what needs it, for the error.
        package: what it is called where it is installed from.
        extra: of tidegate, that brings it.

    Raises:
        ConfigurationError: it is not installed.
    """
    try:
        return import_module(module)
    except ImportError as error:
        raise ConfigurationError(
            f"{of} needs {package}, which is not installed",
            code="sink.no_driver",
            advice=f'install it: pip install "tidegate[{extra}]"',
        ) from error
