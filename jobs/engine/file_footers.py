"""Footers of Parquet files that tasks have written, for who enters the files into a table.

Tasks return them, so the driver need not read the files. A process that lacks one reads it from the
store, as after a restart.
"""

from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from threading import Lock
from typing import Any, Final

import pyarrow as pa

from tidegate.checkpoints.store import Store

_MOST: Final = 4096
_noted: OrderedDict[str, "FileFooter"] = OrderedDict()
"""Address of a file -> its footer, oldest first. No address is written twice."""
_lock = Lock()


@dataclass(frozen=True)
class FileFooter:
    """A footer, as a Parquet file without rows, and the bytes of the whole file."""

    data: bytes
    size: int

    @classmethod
    def pack(cls, metadata: Any, size: int) -> "FileFooter":
        """Return the footer that PyArrow has read of a file."""
        sink = pa.BufferOutputStream()
        metadata.write_metadata_file(sink)
        return cls(sink.getvalue().to_pybytes(), size)


def note_footers(store: Store, footers: Mapping[str, FileFooter]) -> None:
    """Keep the footers of files by their keys in a store; the oldest ones give way."""
    with _lock:
        for key, footer in footers.items():
            _noted[store.uri(key)] = footer
        while len(_noted) > _MOST:
            _noted.popitem(last=False)


def find_footer(address: str) -> FileFooter | None:
    """Return the footer of a file, if this process knows it."""
    with _lock:
        return _noted.get(address)
