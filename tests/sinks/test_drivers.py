"""Client libraries of sinks."""

from __future__ import annotations

import json

import pytest

from tidegate.errors import ConfigurationError
from tidegate.jobs.sinks.base_follower import import_client_library


def test_a_missing_library_names_the_extra_that_brings_it() -> None:
    """Not a traceback of an import, but which sink needs what, and the command that installs it."""
    assert import_client_library("json", of="sinks.a", extra="none") is json
    with pytest.raises(
        ConfigurationError, match=r"sinks\.a needs no-such-module-anywhere, which is not installed"
    ) as refused:
        import_client_library("no_such_module_anywhere", of="sinks.a", extra="postgres")
    assert 'pip install "tidegate[postgres]"' in str(refused.value)
