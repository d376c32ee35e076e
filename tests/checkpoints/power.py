"""A disk that loses its power: what was not flushed may be gone, each piece by itself.

`os.fsync` is watched. A file's content counts as kept from its flush on, a folder's entries from
the folder's flush on. After the cut a new folder is made from what was kept; whatever was written
since may be there or not, by dice.
"""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Literal
from unittest.mock import patch

Skip = Literal["", "content", "folders"]


class PowerCutError(Exception):
    """The machine is off."""


class Disk:
    """A folder whose flushes are watched.

    Args:
        root: the folder.
        cut: the flush at which the power goes; the flush does not happen.
        skip: flushes that are left out, as a careless program would.
    """

    def __init__(self, root: Path, cut: int, skip: Skip = "") -> None:
        self.root, self._left, self._skip = root, cut, skip
        self._content: dict[int, bytes] = {}
        self._entries: dict[int, dict[str, int]] = {}
        self._keep_everything()

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Everything in here is written to this disk.

        Ends early, and silently, when the power goes.
        """
        real = os.fsync

        def fsync(handle: int) -> None:
            self._left -= 1
            if self._left < 0:
                raise PowerCutError
            self._flushed(Path(os.readlink(f"/proc/self/fd/{handle}")), os.fstat(handle).st_ino)

        with patch.object(os, "fsync", fsync), suppress(PowerCutError):
            yield
        assert os.fsync is real

    def after(self, root: Path, seed: int) -> Path:
        """What is there when the power is back."""
        self._restore(self.root, self.root.stat().st_ino, root, random.Random(seed))
        return root

    def _keep_everything(self) -> None:
        for folder, _, names in os.walk(self.root):
            for name in names:
                path = Path(folder, name)
                self._content[path.stat().st_ino] = path.read_bytes()
            self._entries[Path(folder).stat().st_ino] = _entries(Path(folder))

    def _flushed(self, path: Path, inode: int) -> None:
        if path.is_dir():
            if self._skip != "folders":
                self._entries[inode] = _entries(path)
        elif self._skip != "content":
            self._content[inode] = path.read_bytes()

    def _restore(self, now: Path, inode: int, into: Path, dice: random.Random) -> None:
        into.mkdir()
        kept, there = self._entries.get(inode, {}), _entries(now) if now.is_dir() else {}
        for name in sorted({*kept, *there}):
            old, new = kept.get(name), there.get(name)
            chosen = dice.choice(
                (old, new)
            )  # an entry that changed since its folder was flushed: either
            if chosen is None:
                continue
            path = now / name
            if chosen in self._entries or (chosen == new and path.is_dir()):
                self._restore(path, chosen, into / name, dice)
            else:
                (into / name).write_bytes(
                    self._bytes(path if chosen == new else None, chosen, dice)
                )

    def _bytes(self, path: Path | None, inode: int, dice: random.Random) -> bytes:
        """Content that was flushed is whole; any other is cut off somewhere."""
        if inode in self._content:
            return self._content[inode]
        data = path.read_bytes() if path and path.is_file() else b""
        return data[: dice.randrange(len(data) + 1)]


def _entries(folder: Path) -> dict[str, int]:
    return {entry.name: entry.inode() for entry in os.scandir(folder)}
