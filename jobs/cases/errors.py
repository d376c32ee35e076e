"""Error catalogue of the test cases of pipelines."""

from tidegate.errors import load_catalogue

__getattr__ = load_catalogue(__name__)
