"""The errors of the decider: input that breaks what its source promised."""

from tidegate.errors import load_catalogue

__getattr__ = load_catalogue(__name__)
