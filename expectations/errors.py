"""Error catalogue of the quality checks and their suites."""

from tidegate.errors import load_catalogue

__getattr__ = load_catalogue(__name__)
