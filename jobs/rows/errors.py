"""The errors of reading and judging rows."""

from tidegate.errors import load_catalogue

__getattr__ = load_catalogue(__name__)
