"""A real MinIO: found or waited for, started, killed, started again, with a user who may do no more
than needed.
"""

from __future__ import annotations

import fcntl
import os
import stat
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import boto3
import pytest
from botocore.config import Config
from botocore.exceptions import ClientError

from tidegate.errors import TransientError
from tidegate.infra import minio_server
from tidegate.infra.minio_server import (
    MinioServer,
    ensure_minio,
    locate_cache_folder,
    provision_bucket,
)
from tidegate.infra.provision import REGION, Credentials


def _client(server: MinioServer, keys: Credentials) -> Any:
    return boto3.client(
        "s3",
        endpoint_url=server.endpoint,
        aws_access_key_id=keys.access_key,
        aws_secret_access_key=keys.secret_key,
        region_name=REGION,
        config=Config(retries={"max_attempts": 1}),
    )


@pytest.fixture
def server(tmp_path: Path) -> Iterator[MinioServer]:
    server = MinioServer(ensure_minio(print), tmp_path / "data", tmp_path / "minio.log")
    server.start()
    yield server
    server.stop()


@pytest.mark.minio
def test_survives_kill_minus_9(server: MinioServer) -> None:
    """After kill -9 it comes back at the same address with every acknowledged object and the same
    users.
    """
    app = Credentials.generate("app")
    provision_bucket(server, "tidegate", app)
    endpoint = server.endpoint
    _client(server, app).put_object(Bucket="tidegate", Key="a/b", Body=b"kept", IfNoneMatch="*")
    server.kill()
    assert not server.alive
    assert not server.is_healthy()
    server.start()
    assert server.endpoint == endpoint
    assert _client(server, app).get_object(Bucket="tidegate", Key="a/b")["Body"].read() == b"kept"


@pytest.mark.minio
def test_application_user_has_its_bucket_only(server: MinioServer) -> None:
    """The user the pipelines run as can neither make a bucket nor look into another one."""
    app = Credentials.generate("app")
    provision_bucket(server, "tidegate", app)
    provision_bucket(server, "tidegate", app)  # safe to repeat
    _client(server, server.root).create_bucket(Bucket="others")
    with pytest.raises(ClientError, match="AccessDenied"):
        _client(server, app).create_bucket(Bucket="mine")
    with pytest.raises(ClientError, match="AccessDenied"):
        _client(server, app).list_objects_v2(Bucket="others")


def test_says_which_log_to_read_when_it_cannot_start(tmp_path: Path) -> None:
    """A server that ends while starting is one clear sentence with its log, and no wait for the
    time-out.
    """
    server = MinioServer(Path("/bin/false"), tmp_path / "data", tmp_path / "minio.log")
    with pytest.raises(TransientError, match="ended while starting") as caught:
        server.start(timeout=600)
    assert str(tmp_path / "minio.log") in str(caught.value)


def test_server_on_path_comes_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A `minio` on PATH is used as it is, and nothing is built."""
    program = tmp_path / "minio"
    program.write_text("#!/bin/sh\n")
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert ensure_minio(print, tmp_path / "cache") == program


def test_second_build_waits_for_the_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two commands at once build once.

    The second waits, says so, and takes the first one's program.
    """
    monkeypatch.setenv("PATH", "")
    monkeypatch.setattr(minio_server, "_build_minio", lambda *_: pytest.fail("built twice"))
    folder = tmp_path / "bin"
    folder.mkdir()
    waiting = threading.Event()
    with (folder / "minio.lock").open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        found: list[Path] = []
        second = threading.Thread(
            target=lambda: found.append(ensure_minio(lambda _: waiting.set(), tmp_path))
        )
        second.start()
        assert waiting.wait(120)
        (folder / "minio").touch()  # the first build ends
    second.join(120)
    assert found == [folder / "minio"]


def test_failed_build_names_its_log_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A build that fails says why and where to read on, and no half-made program is left to be
    found next time.
    """
    tools = tmp_path / "tools"
    tools.mkdir()
    go = tools / "go"
    go.write_text(
        '#!/bin/sh\n[ "$1" = env ] && echo go1.26.1 && exit 0\necho "no route to the proxy" >&2;'
        " exit 1\n"
    )
    go.chmod(0o755)
    monkeypatch.setenv("PATH", str(tools))
    (tmp_path / "cache" / "bin" / "minio-build-killed").mkdir(parents=True)
    lines: list[str] = []
    with pytest.raises(TransientError, match="no route to the proxy") as caught:
        ensure_minio(lines.append, tmp_path / "cache")
    assert "minio-build.log" in str(caught.value)
    assert sorted(os.listdir(tmp_path / "cache" / "bin")) == ["minio-build.log", "minio.lock"]
    assert any("3 to 5 minutes" in line for line in lines)


def test_a_finished_build_is_found_the_next_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What Go leaves in GOBIN becomes the cached program in one rename.

    The second call builds nothing.
    """
    tools = tmp_path / "tools"
    tools.mkdir()
    go = tools / "go"
    go.write_text(
        '#!/bin/sh\n[ "$1" = env ] && echo go1.24.0 && exit 0\nset -e\necho "$2" > "$GOBIN/minio"\n'
    )
    go.chmod(0o755)
    monkeypatch.setenv("PATH", str(tools))
    program = ensure_minio(lambda _: None, tmp_path / "cache")
    assert program.read_text().startswith("github.com/minio/minio@")
    assert sorted(os.listdir(program.parent)) == ["minio", "minio-build.log", "minio.lock"]
    go.unlink()
    assert ensure_minio(lambda _: pytest.fail("it said something"), tmp_path / "cache") == program


def test_go_s_checksum_database_is_always_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A user's Go settings must not switch off the check of MinIO's sources."""
    tools = tmp_path / "tools"
    tools.mkdir()
    go = tools / "go"
    go.write_text(
        '#!/bin/sh\n[ "$1" = env ] && echo go1.24.0 && exit 0\n'
        'echo "$GOSUMDB,$GONOSUMDB,$GOPRIVATE,$GOINSECURE,$GOFLAGS" > "$GOBIN/minio"\n'
    )
    go.chmod(0o755)
    monkeypatch.setenv("PATH", str(tools))
    monkeypatch.setenv("GOSUMDB", "off")
    monkeypatch.setenv("GOFLAGS", "-insecure -modcacherw")
    for name in ("GONOSUMDB", "GOPRIVATE", "GOINSECURE"):
        monkeypatch.setenv(name, "*")
    program = ensure_minio(lambda _: None, tmp_path / "cache")
    assert program.read_text() == "sum.golang.org,none,none,none,-trimpath\n"


def test_cache_folder_follows_the_environment() -> None:
    """The XDG variable decides where builds are kept."""
    assert locate_cache_folder({"XDG_CACHE_HOME": "/elsewhere"}) == Path("/elsewhere/tidegate")


def test_secrets_stay_out_of_repr() -> None:
    """Printing credentials shows no secret."""
    keys = Credentials.generate("app")
    assert keys.secret_key not in repr(keys)
