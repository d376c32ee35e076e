"""Partial aggregates on their way from tasks to the driver.

They are part of a task's answer up to a size: Spark bounds what the tasks of a job send. Larger
ones go by way of the store, as objects of the attempt, which the driver deletes when it has them.
"""

from collections.abc import Mapping
from typing import Final
from uuid import uuid4

from tidegate.checkpoints.bucket_layout import AttemptFolders
from tidegate.checkpoints.store import Store, map_in_threads

RESULT_BYTES: Final = 16 << 20
"""All that the tasks of one job may send to the driver."""
SENT_BYTES: Final = 12 << 20
"""Partial aggregates among them, compressed."""


def store_partials(
    store: Store, folders: AttemptFolders, number: int, partials: Mapping[str, bytes]
) -> dict[str, str]:
    """Put the partial aggregates of a unit into the store; return window -> key.

    A task that runs twice writes other objects.
    """
    keys = {}
    for name, packed in partials.items():
        stem = folders.segment_stem(f"partials:{name}")
        keys[name] = f"{stem}-{number:05d}-{uuid4().hex[:12]}.arrow"
        store.put(keys[name], packed)
    return keys


def take_partials(store: Store, keys: Mapping[str, str]) -> dict[str, bytes]:
    """Fetch and delete what `store_partials` wrote.

    Raises:
        TransientError: the store does not answer.
    """

    def take(key: str) -> bytes:
        """Fetch one and delete it."""
        data = store.get(key).data
        store.delete(key)
        return data

    found = map_in_threads(take, list(keys.values()), 4)
    return dict(zip(keys, found, strict=True))
