"""Error catalogue of the command line."""

from tidegate.errors import load_catalogue

__getattr__ = load_catalogue(__name__)
