"""Error catalogue of the driver, its landing process, backfills and the class archive."""

from tidegate.errors import load_catalogue

__getattr__ = load_catalogue(__name__)
