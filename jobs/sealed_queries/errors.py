"""Error catalogue of jobs: what is wrong with a script, its queries or its checkpoints."""

from tidegate.errors import load_catalogue

__getattr__ = load_catalogue(__name__)
