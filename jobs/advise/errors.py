"""Error catalogue of the lag advice and its pictures."""

from tidegate.errors import load_catalogue

__getattr__ = load_catalogue(__name__)
