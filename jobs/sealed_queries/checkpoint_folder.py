"""Where Spark keeps the checkpoint of a query: a folder of this host, or a prefix of the bucket."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from tidegate.checkpoints.store import (
    CopyingStore,
    NotFoundError,
    ObjectInfo,
    PreconditionFailedError,
    map_in_threads,
)

_HEAD = "metadata"  # a checkpoint without it is not whole


@dataclass(frozen=True, slots=True)
class BucketFile:
    """One file of a checkpoint in the bucket, which can be copied there."""

    store: CopyingStore
    info: ObjectInfo

    def copy_to(self, store: CopyingStore, key: str) -> str:
        """Let the server copy exactly this version, and return the ETag of the copy.

        Raises:
            FileNotFoundError: it is gone, or was written again.
        """
        try:
            return store.copy_from(self.store, self.info.key, self.info.etag, key)
        except (NotFoundError, PreconditionFailedError) as error:
            raise FileNotFoundError(self.store.uri(self.info.key)) from error


CheckpointFile = Path | BucketFile


@dataclass(frozen=True)
class HostFolder:
    """A checkpoint in a folder of this host. Paths are relative to it.

    Attributes:
        look_every: seconds from one unasked look for new batches to the next.
    """

    root: Path
    look_every: ClassVar[float] = 0.0

    @property
    def address(self) -> str:
        """The path, which Spark is given as the checkpoint location."""
        return str(self.root)

    def exists(self) -> bool:
        """Whether there is a whole checkpoint.

        `metadata` says so: Spark writes it before anything else, this package after all else.
        """
        return (self.root / _HEAD).is_file()

    def list_files(self, below: str = "") -> dict[str, CheckpointFile]:
        """List the files below a folder, except those whose names begin with a dot.

        What Spark deletes meanwhile is left out.

        Args:
            below: empty, or ends with a slash.
        """
        return {
            path.relative_to(self.root).as_posix(): path
            for folder, _, names in os.walk(self.root / below)
            for name in names
            if not name.startswith(".")
            for path in (Path(folder, name),)
        }

    def read(self, path: str) -> bytes:
        """Read one small file.

        Raises:
            FileNotFoundError: there is none.
        """
        return (self.root / path).read_bytes()

    def delete(self, path: str) -> None:
        """Delete a file if it exists, and Hadoop's checksum beside it."""
        file = self.root / path
        file.unlink(missing_ok=True)
        file.with_name(f".{file.name}.crc").unlink(missing_ok=True)

    def claim(self, path: str, owner: str) -> str:
        """Write `owner` into a file unless it exists, and return what the file says."""
        file = self.root / path
        with contextlib.suppress(FileExistsError), file.open("x", encoding="utf-8") as new:
            new.write(owner)
        return file.read_text("utf-8")


@dataclass(frozen=True)
class BucketFolder:
    """A checkpoint below a prefix of a bucket, which ends with a slash or is empty.

    It has the methods of `HostFolder`.
    """

    store: CopyingStore
    prefix: str
    look_every: ClassVar[float] = 10.0  # each look costs requests

    @property
    def address(self) -> str:
        """The address that Hadoop's S3A knows."""
        return self.store.uri(self.prefix.rstrip("/")).replace("s3://", "s3a://", 1)

    def exists(self) -> bool:
        """Whether the checkpoint is whole."""
        return self.store.stat(f"{self.prefix}{_HEAD}") is not None

    def enter(self, name: str) -> BucketFolder:
        """Return a folder below this one."""
        return BucketFolder(self.store, f"{self.prefix}{name}/")

    def list_files(self, below: str = "") -> dict[str, CheckpointFile]:
        """List the objects, a request per thousand."""
        return {
            entry.key[len(self.prefix) :]: BucketFile(self.store, entry)
            for entry in self.store.list_objects(f"{self.prefix}{below}")
            if not entry.key.rpartition("/")[2].startswith(".")
        }

    def read(self, path: str) -> bytes:
        """Read an object."""
        try:
            return self.store.get(f"{self.prefix}{path}").data
        except NotFoundError as error:
            raise FileNotFoundError(self.store.uri(f"{self.prefix}{path}")) from error

    def delete(self, path: str) -> None:
        """Delete an object."""
        self.store.delete(f"{self.prefix}{path}")

    def claim(self, path: str, owner: str) -> str:
        """Create the object by a conditional PUT, or read it."""
        with contextlib.suppress(PreconditionFailedError):
            self.store.create(f"{self.prefix}{path}", owner.encode())
        return self.read(path).decode()

    def copy_file(self, path: str, file: BucketFile) -> None:
        """Let the server copy a file of the bucket here.

        Raises:
            FileNotFoundError: it is gone, or was written again.
        """
        file.copy_to(self.store, f"{self.prefix}{path}")

    def upload(self, files: Mapping[str, Path]) -> None:
        """Upload files of this host; `metadata`, which makes the checkpoint whole, comes last."""
        rest = [path for path in files if path != _HEAD]
        map_in_threads(lambda path: self.store.upload(files[path], f"{self.prefix}{path}"), rest)
        self.store.upload(files[_HEAD], f"{self.prefix}{_HEAD}")


CheckpointFolder = HostFolder | BucketFolder
