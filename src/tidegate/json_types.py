"""The type of the JSON objects that tidegate writes, reads and answers with."""

from __future__ import annotations

from typing import Any

JsonObject = dict[str, Any]
"""What `json.loads` returns for an object: text to anything that JSON can express."""
