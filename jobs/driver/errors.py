"""Error catalogue of the driver, its landing process, backfills and the class archive."""

from __future__ import annotations

from tidegate.errors import load_catalogue

__getattr__ = load_catalogue(__name__)
