"""The errors of reading and checking a pipeline spec."""

from tidegate.errors import load_catalogue

__getattr__ = load_catalogue(__name__)
