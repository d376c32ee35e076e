"""The errors of the Spark mover and of reading topics with Spark."""

from tidegate.errors import load_catalogue

__getattr__ = load_catalogue(__name__)
