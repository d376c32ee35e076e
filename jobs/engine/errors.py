"""The errors of the engine; see `tidegate.errors.ErrorDefinition`."""

from __future__ import annotations

from collections.abc import Sequence

from tidegate.errors import PoisonError, load_catalogue


class CorruptObjectsError(PoisonError):
    """Data pages of objects cannot be read, although their footers can.

    The engine ends the epoch with a `TransientError`. Its next plan has dead letters instead.

    Attributes:
        keys: keys of the objects.
    """

    keys: tuple[str, ...] = ()

    @classmethod
    def for_keys(cls, keys: Sequence[str]) -> CorruptObjectsError:
        """Return the error for these objects."""
        error: CorruptObjectsError = __getattr__("PAGES_CORRUPT")(keys=", ".join(keys))
        error.keys = tuple(keys)
        return error


class FileUnreadableError(PoisonError):
    """A file of the pipeline's state or tables is cut off, or holds other bytes."""


class BrokenRuleError(PoisonError):
    """A row breaks a rule of severity ``fail``; the engine says in which epoch."""


__getattr__ = load_catalogue(__name__)
