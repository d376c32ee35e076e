"""Error catalogue of the sources: objects, lakehouse tables, Kafka and its schema registry."""

from tidegate.errors import load_catalogue

__getattr__ = load_catalogue(__name__)
