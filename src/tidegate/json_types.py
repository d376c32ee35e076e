"""The type of the JSON objects that tidegate writes, reads and answers with."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

JsonObject = dict[str, Any]
"""What `json.loads` returns for an object: text to anything that JSON can express."""

JsonView = Mapping[str, Any]
"""The same, for those who only read it."""
