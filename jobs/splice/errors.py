"""Error catalogue of splice requests, merges and row traces."""

from tidegate.errors import ConfigurationError, load_catalogue


class TooEarlyError(ConfigurationError):
    """A driver could still take some of the rows, or change a result that they change."""


__getattr__ = load_catalogue(__name__)
