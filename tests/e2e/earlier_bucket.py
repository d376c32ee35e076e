"""A small bucket that the driver of an earlier commit wrote; it is stored with the tests.

``python -m tests.e2e.earlier_bucket`` writes the archive again, with the wheel of that commit.
"""

from __future__ import annotations

import io
import os
import sys
import tarfile
import tempfile
from pathlib import Path

from tests.e2e.drivers import Piped, Steady
from tests.e2e.feed import SPEC
from tests.servers.minio import running
from tests.wheels import build_earlier_wheel

ARCHIVE = Path(__file__).with_suffix(".tar.xz")
URL = "s3://tidegate/earlier"  # stands in the metadata of the bucket's tables
EPOCHS = 3
OBJECTS = 9
"""Of each source; an epoch reads one."""
ROWS = 1_077
"""Of data, in all objects."""


def open_bucket(folder: Path) -> Piped:
    """The pipeline of the archive, in an empty bucket or in the place of what it became.

    The environment names a MinIO with the bucket `tidegate`.
    """
    with tarfile.open(ARCHIVE) as files:
        found = {member.name: files.extractfile(member) for member in files}
        objects = {name: file.read() for name, file in found.items() if file is not None}
    pipeline = Piped(folder, objects.pop("steady.yaml").decode(), URL)
    store = pipeline.store()
    for left in list(store.list_objects("")):
        store.delete(left.key)
    for key, data in objects.items():
        store.put(key, data)
    return pipeline


def write_archive(folder: Path) -> None:
    """Let the driver of the earlier commit seal some epochs, and keep all objects of its bucket."""
    steady = Steady(folder / "p", OBJECTS, URL)
    store = steady.store()
    for file in sorted(steady.inbox.rglob("*")):
        if file.is_file():
            store.upload(file, str(file.relative_to(steady.inbox)))
    code = {"PYTHONPATH": str(build_earlier_wheel(folder))}
    if steady.run("", "--epochs", str(EPOCHS), environment=code) != 0:
        raise RuntimeError(steady.log_text())
    objects = {found.key: store.get(found.key).data for found in store.list_objects("")}
    with tarfile.open(ARCHIVE, "w:xz") as files:
        for name, data in {"steady.yaml": SPEC.encode(), **objects}.items():
            member = tarfile.TarInfo(name)
            member.size = len(data)
            files.addfile(member, io.BytesIO(data))
    sys.stdout.write(f"{len(objects)} objects, {steady.rows} rows of data\n")


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as name, running(Path(name) / "minio") as minio:
        os.environ.update(minio.environment())
        write_archive(Path(name))
