"""Presence and sizes of many objects at the price of a few listings.

A checkpoint with a gigabyte of state names more than a hundred segments; asking for each by itself would make recovery grow with
the state. Segments lie side by side below one `state/` prefix per timeline, so pages of it show them with their sizes.

What a listing shows is there. What it does not show was not looked for, or was not seen: a listing condemns nothing, and whoever
judges asks for that object by itself.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import groupby

from tidegate.checkpoints.store import Store, StoreDeniedError
from tidegate.jobs.spec.errors import TransientError

__all__ = ["list_object_sizes"]

_KEYS_PER_PAGE = 500  # keys in one request
_MIN_WANTED_KEYS = 10  # wanted objects below which a page costs more than asking for each: a page of 500 takes a MinIO some 15 HEADs


def list_object_sizes(store: Store, keys: Iterable[str]) -> dict[str, int]:
    """Sizes of those objects that listings showed; empty where listing fails or is not worth it."""
    found: dict[str, int] = {}
    for prefix, group in groupby(sorted(keys), key=_find_scan_prefix):
        try:
            for sizes in _scan_listing_pages(store, prefix, [*group]):
                found |= sizes
        except (TransientError, StoreDeniedError):
            return found
    return found


def _scan_listing_pages(store: Store, prefix: str, wanted: list[str]) -> Iterator[dict[str, int]]:
    """What each page shows of the wanted keys; stops when pages show so few of them that they are not worth it."""
    while len(wanted) >= _MIN_WANTED_KEYS:
        page = {entry.key: entry.size for entry in store.list_objects(prefix, start_after=wanted[0][:-1], limit=_KEYS_PER_PAGE)}
        shown = {key: page[key] for key in wanted if key in page}
        yield shown
        if len(page) < _KEYS_PER_PAGE or len(shown) < _MIN_WANTED_KEYS:
            return
        end = max(page)
        wanted = [key for key in wanted if key > end]


def _find_scan_prefix(key: str) -> str:
    """The folder in which the attempts' folders lie side by side: `.../state/` or `.../tables/<table>/`."""
    head, found, _ = key.partition("/state/")
    return head + found if found else key.rsplit("/", 2)[0] + "/"
