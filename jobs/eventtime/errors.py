"""The errors of the decider: input that breaks what its source promised."""

from __future__ import annotations

from tidegate.errors import load_catalogue

__getattr__ = load_catalogue(__name__)
