"""What the script of a job may import from tidegate; it need not.

from tidegate.job import on_restore

@on_restore("enriched")
def take_back(query: str, batch: int | None) -> None:
    ...  # remove what batches after `batch` wrote; None: everything
"""

from collections.abc import Callable
from typing import TypeVar

RestoreCallback = Callable[[str, int | None], object]
C = TypeVar("C", bound=RestoreCallback)
_callbacks: dict[str, RestoreCallback] = {}


def on_restore(*queries: str) -> Callable[[C], C]:
    """Register a function that takes batches out of the sinks of queries.

    It is called before a query starts from a checkpoint that may be behind its sink: after a
    restore, and when a launch cannot go on with the checkpoint folder of the one before. It gets
    the name of the query and the last batch that the sink should hold, or None if it should hold
    none. It may be called again with the same batch, and has no effect without tidegate.

    Args:
        queries: names of the queries; none for all that have no function of their own. A later
            function for the same query replaces the earlier one.
    """

    def register(function: C) -> C:
        _callbacks.update(dict.fromkeys(queries or ("*",), function))
        return function

    return register


def find_restore_callback(query: str) -> RestoreCallback | None:
    """Return the function for a query, or the one for all queries; None if there is neither."""
    return _callbacks.get(query, _callbacks.get("*"))
