"""Error catalogue of the tables, the sinks, their compaction and their readers."""

from tidegate.errors import TransientError, load_catalogue


class LedgerMovedError(TransientError):
    """Another publisher moved the ledger. Nothing was applied; the caller starts again."""


__getattr__ = load_catalogue(__name__)
