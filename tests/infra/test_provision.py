"""`python -m tidegate.infra.provision` gives a user rights on a MinIO, and says in a line why it
could not.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pytest
from tests.servers.minio import RealMinio

from tidegate.checkpoints.s3_store import S3Settings, S3Store
from tidegate.checkpoints.store import StoreDeniedError
from tidegate.checkpoints.store_probe import require_honest_store
from tidegate.infra.local_processes import choose_free_port
from tidegate.infra.policies import Role, build_policy
from tidegate.infra.provision import Credentials, main

Called = Callable[..., tuple[int, str]]


@pytest.fixture
def called(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Called:
    """The program with these variables: its exit code and what it said."""

    def call(
        environment: Mapping[str, str], policy: Path | None = None, only: bool = False
    ) -> tuple[int, str]:
        for name, value in environment.items():
            monkeypatch.setenv(name, value)
        code = 0
        try:
            main(policy, only)
        except SystemExit as ended:
            code = int(ended.code or 0)
        said = capsys.readouterr()
        return code, said.out + said.err

    return call


def variables(endpoint: str, root: Credentials, user: Credentials) -> dict[str, str]:
    """What the program wants to know."""
    return {
        "TIDEGATE_STORE": "s3://provisioned",
        "TIDEGATE_S3_ENDPOINT": endpoint,
        "MINIO_ROOT_USER": root.access_key,
        "MINIO_ROOT_PASSWORD": root.secret_key,
        "TIDEGATE_S3_ACCESS_KEY": user.access_key,
        "TIDEGATE_S3_SECRET_KEY": user.secret_key,
    }


def roles_of(folder: Path, *pipelines: str) -> Iterator[Path]:
    """A file with the driver's rights for each pipeline."""
    for pipeline in pipelines:
        role = folder / f"{pipeline}.json"
        role.write_text(
            json.dumps(build_policy(Role.DRIVER, "provisioned", pipeline, inputs=["inbox/web"]))
        )
        yield role


def store_of(endpoint: str, user: Credentials) -> S3Store:
    """The bucket with this user's keys."""
    keys = {"access_key": user.access_key, "secret_key": user.secret_key}
    return S3Store(
        S3Settings.model_validate({"bucket": "provisioned", "endpoint": endpoint, **keys})
    )


@pytest.mark.minio
def test_a_bucket_and_a_user_with_a_role(
    real_minio: RealMinio, called: Called, tmp_path: Path
) -> None:
    """The bucket is made.

    The user has the whole of it, and on demand the role's rights only; repeating changes nothing.
    """
    server, user = real_minio.server, Credentials.generate("driver")
    given = variables(server.endpoint, server.root, user)
    assert called(given) == (0, f"bucket provisioned: {user.access_key} has all of it\n")
    store = store_of(server.endpoint, user)
    store.put("anywhere", b"x")
    (role,) = roles_of(tmp_path, "shop")
    assert "keeps 1 other policies (--only takes them away)" in called(given, role)[1]
    store.put("anywhere", b"x")
    for _ in range(2):
        assert called(given, role, only=True) == (
            0,
            f"bucket provisioned: {user.access_key} has the rights of {role}\n",
        )
    require_honest_store(store)
    store.put("shop/lease.json", b"{}")
    with pytest.raises(StoreDeniedError):
        store.put("anywhere", b"y")


@pytest.mark.minio
def test_one_key_for_two_pipelines(real_minio: RealMinio, called: Called, tmp_path: Path) -> None:
    """The rights for a second pipeline come on top of those for the first."""
    server, user = real_minio.server, Credentials.generate("driver")
    for role in roles_of(tmp_path, "shop", "flights", "shop"):
        assert called(variables(server.endpoint, server.root, user), role)[0] == 0
    store = store_of(server.endpoint, user)
    for pipeline in ("shop", "flights"):
        store.put(f"{pipeline}/lease.json", b"{}")
    with pytest.raises(StoreDeniedError):
        store.put("other/lease.json", b"{}")


@pytest.mark.minio
def test_no_driver_can_shorten_the_log(
    real_minio: RealMinio, called: Called, tmp_path: Path
) -> None:
    """A driver's keys delete what the retention deletes, and no document of the log."""
    server, user = real_minio.server, Credentials.generate("driver")
    (role,) = roles_of(tmp_path, "shop")
    called(variables(server.endpoint, server.root, user), role, only=True)
    store = store_of(server.endpoint, user)
    kept = (
        "timelines/0/slots/9999999998.json",
        "identity.json",
        "lease.json",
        "desired.json",
        "deployed.json",
        "deployed/ab.json",
        "roots.json",
        "sinks/w.json",
        "specs/ab.json",
        "trail/r.json",
        "splices/r.json",
        "arrivals/a/p/1.json",
    )
    for name in kept:
        store.put(f"shop/{name}", b"{}")
        with pytest.raises(StoreDeniedError):
            store.delete(f"shop/{name}")
    retired = (
        "timelines/0/tables/events/000001-ab/1.parquet",
        "timelines/0/state/000001-ab/1",
        "index/1.json",
        "requests/r.json",
        "acks/r.json",
        "logs/a/0.log",
        "iceberg/events/metadata/1.json",
        "staging/d/1",
        "quality/docs/1.html",
    )
    for name in retired:
        store.put(f"shop/{name}", b"{}")
        store.delete(f"shop/{name}")
    store.put("shop__bf_1/timelines/0/slots/9999999998.json", b"{}")
    store.delete("shop__bf_1/timelines/0/slots/9999999998.json")


@pytest.mark.minio
def test_wrong_keys_are_reported(real_minio: RealMinio, called: Called) -> None:
    """A MinIO that refuses is a fault of configuration, in one line."""
    code, said = called(
        variables(
            real_minio.server.endpoint, Credentials.generate("nobody"), Credentials.generate("app")
        )
    )
    assert code == 2
    assert "refused" in said


def test_what_is_missing_is_reported(called: Called, tmp_path: Path) -> None:
    """Variables that are not set, a store without a bucket, a file without a policy, a server
    that is away.
    """
    away = variables(
        f"http://127.0.0.1:{choose_free_port()}",
        Credentials.generate("root"),
        Credentials.generate("app"),
    )
    no_policy = tmp_path / "no.json"
    no_policy.write_text("{")
    cases: list[tuple[dict[str, str], Path | None, int, str]] = [
        (dict.fromkeys(away, ""), None, 2, "not set: TIDEGATE_STORE"),
        (away | {"TIDEGATE_STORE": "/folder"}, None, 2, "not s3://bucket"),
        (away, no_policy, 2, "does not hold a policy"),
        (away, None, 3, "no answer from"),
    ]
    for environment, policy_file, code, words in cases:
        ended, said = called(environment, policy_file)
        assert ended == code
        assert words in said
