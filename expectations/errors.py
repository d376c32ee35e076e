"""Error catalogue of the quality checks and their suites."""

from __future__ import annotations

from tidegate.errors import load_catalogue

__getattr__ = load_catalogue(__name__)
