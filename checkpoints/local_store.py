"""A store in a local folder: the default of `tidegate run`.

Every write takes these steps: write a temporary file, fsync it, give it its name (`link` for
create, `rename` otherwise), fsync every folder whose entries changed. Only then is the write
acknowledged. An error after the file got its name is an unknown outcome.

`compare_and_swap`, `put` and `delete` hold one `flock`, so that comparing and replacing are one
step. On network file systems, flock and link are not reliable; they are refused.
"""

import errno
import fcntl
import os
import secrets
import shutil
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from urllib.parse import quote_from_bytes, unquote_to_bytes

from tidegate.errors import TidegateError

from .canonical_json import sha256_of_bytes, sha256_of_file
from .errors import (
    FILE_NAME_TAKEN,
    FOLDER_DENIED,
    NETWORK_FILE_SYSTEM,
    OBJECT_NOT_FOUND,
    OUTCOME_UNKNOWN,
    PRECONDITION_FAILED,
    STORE_FULL,
    STORE_UNAVAILABLE,
)
from .store import (
    FolderNames,
    NotFoundError,
    ObjectInfo,
    StoredObject,
    UploadedObject,
    check_key,
)

_INTERNAL_FOLDER = ".tidegate-store"  # temporary files and the lock; never listed
_NETWORK_FILE_SYSTEMS = {
    *("nfs", "nfs4", "cifs", "smb3", "smbfs", "9p", "afs", "ceph", "glusterfs", "lustre", "gpfs"),
    *("beegfs", "ocfs2", "gfs2"),
}
_SETTLED_SECONDS = 2.0
"""Age from which a further write is sure to change a file's times, however coarse they are."""


class LocalStore:
    """Objects are plain files below `root`; the ETag is the SHA-256 of the content.

    Listings leave `ObjectInfo.etag` empty, because they would have to read every file. A file is
    read again for its ETag only if it is young, or its inode, size or times have changed since.

    A file of another program may have a name that no key has: bytes that are not UTF-8, or a
    backslash. Its key has that name with percent signs, as in an address. It is only read.

    Args:
        root: the folder; it is made if it is missing.
        read_only: nothing is ever written, not even a missing folder or a lock. So the folder needs
            no right to write, and may lie on a network file system.

    Raises:
        ConfigurationError: the folder cannot be used, or lies on a network file system.
        StoreUnavailableError: its disk is full or does not answer.
    """

    def __init__(self, root: Path | str, *, read_only: bool = False) -> None:
        self.root = Path(root).expanduser().absolute()
        self.url = f"file://{self.root}"
        try:
            if not read_only:
                self.root.mkdir(parents=True, exist_ok=True)
            self.root = self.root.resolve()
            self._temporary = self.root / _INTERNAL_FOLDER
            self._lock_file = self._temporary / "lock"
            if not read_only:
                refuse_network_file_system(self.root)
                self._temporary.mkdir(exist_ok=True)
                self._lock_file.touch()
        except OSError as error:
            raise translate_os_error(self.root, error) from error

    def get(self, key: str) -> StoredObject:
        """Read one object."""
        with self._translate_read_errors(key):
            data = self._find_file(key).read_bytes()
        return StoredObject(key, data, sha256_of_bytes(data))

    def get_range(self, key: str, start: int, length: int) -> bytes:
        """Read a part of one object."""
        with self._translate_read_errors(key), self._find_file(key).open("rb") as file:
            file.seek(start)
            return file.read(length)

    def stat(self, key: str) -> ObjectInfo | None:
        """Describe one object, or return None if there is none; may read the file for the ETag."""
        path = self._find_file(key)
        try:
            with self._translate_read_errors(key):
                stat = path.stat()
                return ObjectInfo(key, stat.st_size, _digest_file(path, stat), stat.st_mtime)
        except NotFoundError:
            return None

    def create(self, key: str, data: bytes) -> str:
        """Write a new object: temporary file, fsync, link, fsync of the folders."""
        path = self._resolve_key_path(key)
        with self._open_temporary(key) as temporary:
            _write_durably(temporary, data)
            self._publish_file(path, lambda: os.link(temporary, path))
        return sha256_of_bytes(data)

    def compare_and_swap(self, key: str, data: bytes, etag: str) -> str:
        """Replace exactly one version, under the lock."""
        path = self._resolve_key_path(key)
        with self._open_temporary(key) as temporary, self._hold_store_lock():
            found = sha256_of_file(path) if path.is_file() else "nothing"
            if found != etag:
                raise PRECONDITION_FAILED(uri=self.uri(key), expected=etag, found=found)
            _write_durably(temporary, data)
            self._publish_file(path, lambda: temporary.replace(path))
        return sha256_of_bytes(data)

    def put(self, key: str, data: bytes) -> str:
        """Write without a condition."""
        path = self._resolve_key_path(key)
        with self._open_temporary(key) as temporary:
            _write_durably(temporary, data)
            with self._hold_store_lock():
                self._publish_file(path, lambda: temporary.replace(path))
        return sha256_of_bytes(data)

    def list_objects(
        self, prefix: str, *, start_after: str | None = None, limit: int | None = None
    ) -> Iterator[ObjectInfo]:
        """List objects under `prefix` in key order."""
        folder = prefix.rpartition("/")[0]
        count = 0
        for key in self._walk_keys(folder + "/" if folder else "", prefix, start_after or ""):
            if limit is not None and count >= limit:
                return
            try:
                stat = find_file(self.root / key).stat()
            except FileNotFoundError:
                continue  # removed since the folder was read
            except OSError as error:
                raise translate_os_error(self.root / key, error) from error
            count += 1
            yield ObjectInfo(key, stat.st_size, "", stat.st_mtime)

    def list_folders(self, prefix: str) -> FolderNames:
        """Return the folder names directly under `prefix`."""
        with self._translate_read_errors(prefix):
            try:
                names = [
                    e.name
                    for e in os.scandir(find_file(self.root / prefix))
                    if e.is_dir() and e.name != _INTERNAL_FOLDER
                ]
            except (FileNotFoundError, NotADirectoryError):
                return []
        return sorted(self._escape_names(prefix, names))

    def delete(self, key: str) -> None:
        """Remove an object if it exists."""
        path = self._resolve_key_path(key)
        with self._translate_read_errors(key), self._hold_store_lock():
            path.unlink(missing_ok=True)
            if path.parent.is_dir():
                _fsync_path(path.parent)

    def upload(self, path: Path, key: str) -> UploadedObject:
        """Store a file durably; a file that lies under its key already is only fsynced."""
        target = self._resolve_key_path(key)
        digest = sha256_of_file(path)
        if path.absolute() == target:
            with self._translate_read_errors(key):
                _fsync_path(path)
                folder = target.parent
                while folder != self.root.parent:
                    _fsync_path(folder)
                    folder = folder.parent
        else:
            with self._open_temporary(key) as temporary:
                shutil.copyfile(path, temporary)
                _fsync_path(temporary)
                self._publish_file(target, lambda: temporary.replace(target))
        return UploadedObject(key, digest, target.stat().st_size, digest)

    def download(self, key: str, path: Path) -> None:
        """Copy an object into a file."""
        part = path.with_name(f"{path.name}.{secrets.token_hex(4)}.part")
        with self._translate_read_errors(key):
            try:
                shutil.copyfile(self._find_file(key), part)
                part.replace(path)
            finally:
                part.unlink(missing_ok=True)

    def local_path(self, key: str) -> Path | None:
        """Return the path of the file itself, also if there is none; None for an escaped name."""
        path = self._resolve_key_path(key)
        return path if self._find_file(key) == path else None

    def uri(self, key: str) -> str:
        """Return the absolute path of the file."""
        return str(self.root / key)

    def close(self) -> None:
        """Do nothing: no connection is open."""

    def _resolve_key_path(self, key: str) -> Path:
        if check_key(key).split("/", 1)[0] == _INTERNAL_FOLDER:
            raise ValueError(f"reserved: {key!r}")
        return self.root / key

    def _find_file(self, key: str) -> Path:
        return find_file(self._resolve_key_path(key))

    def _escape_names(self, folder: str, names: list[str]) -> list[str]:
        """Return the names as they are in keys.

        Raises:
            ConfigurationError: two files would have the same key.
        """
        if not _is_odd("".join(names)):  # at once, because a folder may have very many
            return names
        escaped = [escape_name(name) for name in names]
        twice = [name for name, number in Counter(escaped).items() if number > 1]
        if twice:
            raise FILE_NAME_TAKEN(path=self.root / folder / twice[0])
        return escaped

    def _publish_file(self, path: Path, give: Callable[[], object]) -> None:
        """Call `give`, which names a durable file; an error after that is an unknown outcome."""
        # The folders whose entries change.
        changed = [path.parent]
        while not changed[-1].is_dir():
            changed.append(changed[-1].parent)
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            give()
        except FileExistsError as error:
            # The caller now relies on the other object, so it has to be durable too.
            _fsync_path(path.parent)
            raise PRECONDITION_FAILED(uri=path, expected="nothing", found="an object") from error
        try:
            for folder in changed:
                _fsync_path(folder)
        except OSError as error:
            raise OUTCOME_UNKNOWN(uri=path, cause=error) from error

    @contextmanager
    def _hold_store_lock(self) -> Iterator[None]:
        with self._lock_file.open("rb") as handle:
            fcntl.flock(handle, fcntl.LOCK_EX)  # released by close, also if the process dies
            yield

    @contextmanager
    def _translate_read_errors(self, key: str) -> Iterator[None]:
        try:
            yield
        except (FileNotFoundError, IsADirectoryError, NotADirectoryError) as error:
            raise OBJECT_NOT_FOUND(uri=self.uri(key)) from error
        except OSError as error:
            raise translate_os_error(self.root / key, error) from error

    @contextmanager
    def _open_temporary(self, key: str) -> Iterator[Path]:
        temporary = self._temporary / secrets.token_hex(16)
        try:
            yield temporary
        except OSError as error:
            raise translate_os_error(self.root / key, error) from error
        finally:
            temporary.unlink(missing_ok=True)

    def _walk_keys(self, folder: str, prefix: str, after: str) -> Iterator[str]:
        try:
            entries = [
                (e.name + "/" if e.is_dir() else e.name)
                for e in os.scandir(find_file(self.root / folder))
                if e.name != _INTERNAL_FOLDER
            ]
        except (FileNotFoundError, NotADirectoryError):
            return
        except OSError as error:
            raise translate_os_error(self.root / folder, error) from error
        entries = self._escape_names(folder, entries)
        # Left out before they are sorted: a reader of a long folder asks for what is new. A folder
        # sorts with its slash, as its keys do: "a-b" comes before "a/b".
        keys = sorted(key for name in entries if _is_within(key := folder + name, prefix, after))
        for key in keys:
            if key.endswith("/"):
                yield from self._walk_keys(key, prefix, after)
            else:
                yield key


def find_file(path: Path) -> Path:
    """Return a path, or if nothing is there, that of the file whose name is escaped in it."""
    if "%" not in str(path) or os.path.exists(path):
        return path
    found = Path(path.anchor)
    for part in path.parts[1:]:
        name = os.fsdecode(unquote_to_bytes(part))
        is_escaped = _is_odd(name) and not {"/", "\0"} & {*name}  # no file has these in its name
        found /= name if is_escaped and not os.path.exists(found / part) else part
    return found


def escape_name(name: str) -> str:
    """Return the name of a file as it is in keys."""
    return quote_from_bytes(os.fsencode(name)) if _is_odd(name) else name


def _is_odd(name: str) -> bool:
    """Return whether a name cannot be in a key: it has a backslash or is not UTF-8."""
    try:
        name.encode()
    except UnicodeEncodeError:
        return True
    return "\\" in name


def _is_within(key: str, prefix: str, after: str) -> bool:
    """Return whether a key is listed, or a folder, which ends in a slash, may hold such keys."""
    if not key.endswith("/"):
        return key.startswith(prefix) and key > after
    if not key.startswith(prefix) and not prefix.startswith(key):
        return False
    return key >= after or after.startswith(key)


def _digest_file(path: Path, stat: os.stat_result) -> str:
    """Return the SHA-256 of a file, which is read again only if it may have changed."""
    version = (stat.st_dev, stat.st_ino, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns)
    # A further write to a young file may leave all its times as they are.
    if time.time() - stat.st_ctime < _SETTLED_SECONDS:
        return sha256_of_file(path)
    return _digest_version(path, version)


@lru_cache(4096)
def _digest_version(path: Path, _version: tuple[int, ...]) -> str:
    return sha256_of_file(path)


def refuse_network_file_system(path: Path, mounts: str | None = None) -> None:
    """Refuse a folder on a network or FUSE file system, where link and flock are not reliable.

    Where there is no mount table (not on Linux), nothing is refused.

    Args:
        path: the folder, absolute and without symbolic links.
        mounts: content of a mount table; default: this process's.

    Raises:
        ConfigurationError: the folder is on such a file system.
    """
    kind = _find_file_system(path, mounts if mounts is not None else _read_mount_table())
    if kind in _NETWORK_FILE_SYSTEMS or kind.startswith("fuse."):
        raise NETWORK_FILE_SYSTEM(path=path, kind=kind)


def _read_mount_table() -> str:
    try:
        return Path("/proc/self/mountinfo").read_text()
    except OSError:
        return ""  # not Linux: the file system is not known


def _find_file_system(path: Path, mounts: str) -> str:
    """Return the type of the file system with the longest mount point above `path`."""
    best, kind = "", ""
    for line in mounts.splitlines():
        left, _, right = line.partition(" - ")
        point = left.split()[4].replace("\\040", " ")
        inside = point == "/" or str(path) == point or str(path).startswith(point + "/")
        if inside and len(point) >= len(best):  # a later mount hides an earlier one
            best, kind = point, right.split()[0]
    return kind


def _write_durably(path: Path, data: bytes) -> None:
    with path.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def _fsync_path(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def translate_os_error(path: Path, error: OSError) -> TidegateError:
    """Return what a store says of an error of its file system; mostly it is transient."""
    cause = error.strerror or str(error)
    if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR):
        return FOLDER_DENIED(path=path, cause=error.strerror)
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return STORE_FULL(uri=path, cause=cause)
    return STORE_UNAVAILABLE(uri=path, cause=cause)
