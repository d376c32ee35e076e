"""What infra/deploy holds is valid, keeps its secrets outside, and gives the rights it should and
no others.
"""

from __future__ import annotations

import contextlib
import re
import shlex
import shutil
import socket
import ssl
import subprocess
import sys
import threading
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
from ruamel.yaml import YAML
from tests.infra.deploy import DEPLOY
from tests.servers.minio import CertifiedMinio, RealMinio

from tidegate.checkpoints.canonical_json import sha256_of_bytes
from tidegate.checkpoints.pipeline_identity import ensure_identity
from tidegate.checkpoints.s3_store import S3Settings, S3Store
from tidegate.checkpoints.slot_log import SlotLog
from tidegate.checkpoints.store import StoreDeniedError, StoreUnavailableError
from tidegate.checkpoints.store_probe import require_honest_store
from tidegate.infra.policies import Role, build_policy
from tidegate.infra.provision import REGION, Credentials

COMPOSE = DEPLOY / "compose" / "compose.yaml"


def compose() -> dict[str, Any]:
    """The compose file, anchors resolved."""
    return dict(YAML(typ="safe").load(COMPOSE))


def test_compose_keeps_its_schema() -> None:
    """The file is what the Compose specification allows, as check-jsonschema brings it."""
    command = [
        sys.executable,
        "-m",
        "check_jsonschema",
        "--builtin-schema",
        "vendor.compose-spec",
        str(COMPOSE),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_compose_has_no_secret_of_its_own() -> None:
    """Every password, key and secret comes from outside and has no default."""
    found = re.findall(r"\$\{([A-Z_]*(?:PASSWORD|SECRET|KEY)[A-Z_]*)(:[?-])?", COMPOSE.read_text())
    assert found
    assert [name for name, rest in found if rest != ":?"] == []


def test_compose_s_spark_serves_only_who_has_its_secret() -> None:
    """Master and workers authenticate, and no argument of a process has the secret."""
    services = compose()["services"]
    for name in ("spark-master", "spark-worker"):
        given = services[name]["environment"]
        assert "-Dspark.authenticate=true" in given["SPARK_DAEMON_JAVA_OPTS"]
        assert "secret" not in given["SPARK_DAEMON_JAVA_OPTS"]
        assert f"./drivers:{given['SPARK_CONF_DIR']}:ro" in services[name]["volumes"]


def test_only_containers_of_airflow_have_its_secrets_in_compose() -> None:
    """Users' code on Spark's workers could sign Airflow's tokens with them, or read its folders."""
    for name, service in compose()["services"].items():
        if name.startswith("airflow") or name == "migrate":
            continue
        assert [key for key in service.get("environment", ()) if key.startswith("AIRFLOW")] == []
        assert [
            v for v in service.get("volumes", ()) if v.startswith(("airflow:", "drivers:"))
        ] == []


def test_compose_is_not_open_to_the_world() -> None:
    """Ports are on loopback; volumes, networks and conditions name what is there."""
    whole = compose()
    for name, service in whole["services"].items():
        assert all(port.startswith("127.0.0.1:") for port in service.get("ports", ())), name
        assert set(service.get("depends_on", ())) <= set(whole["services"]), name
        named = [
            v.partition(":")[0] for v in service.get("volumes", ()) if not v.startswith((".", "$"))
        ]
        assert set(named) <= set(whole["volumes"]), name


def test_grafana_finds_its_dashboard() -> None:
    """The folder of the dashboard is the one that Grafana loads, and its data come from
    the Prometheus beside it.
    """
    services = compose()["services"]
    mounted = dict(volume.split(":")[:2] for volume in services["grafana"]["volumes"])
    folder = {
        source: YAML(typ="safe").load(COMPOSE.parent / source)
        for source in mounted
        if source.endswith(".yaml")
    }
    (provider,) = folder["./grafana-dashboards.yaml"]["providers"]
    assert mounted["../grafana"] == provider["options"]["path"]
    (source,) = folder["./grafana-datasources.yaml"]["datasources"]
    assert source["type"] == "prometheus"
    assert source["url"].split("/")[2].split(":")[0] in services


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd is not installed")
@pytest.mark.parametrize(
    "unit", sorted((DEPLOY / "systemd").glob("*.service")), ids=lambda path: str(path.name)
)
def test_systemd_accepts_the_units(unit: Path, tmp_path: Path) -> None:
    """systemd-analyze finds nothing to complain about, once programs and users replace those of a
    real box.
    """
    text = re.sub(r"^ExecStart=\S+", "ExecStart=/bin/true", unit.read_text(), flags=re.MULTILINE)
    name = unit.name.replace("@.", "@flights.")
    (tmp_path / name).write_text(text)
    done = subprocess.run(
        ["systemd-analyze", "verify", str(tmp_path / name)],
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    complaints = [line for line in done.stderr.splitlines() if name in line]
    assert complaints == []


def test_files_of_the_units_are_private() -> None:
    """Rows are in logs, in checkpoints of jobs and in scratch files."""
    units = sorted((DEPLOY / "systemd").glob("*.service"))
    assert units
    assert [unit.name for unit in units if "\nUMask=0077\n" not in unit.read_text()] == []


def test_systemd_restarts_what_can_be_helped() -> None:
    """Exit codes that need a person are not restarted.

    All else is, and waits: for the lease, or for `tidegate start`.
    """
    unit = (DEPLOY / "systemd" / "tidegate@.service").read_text()
    assert "Restart=always\n" in unit
    assert "RestartPreventExitStatus=1 2\n" in unit
    assert re.search(r"^ExecStart=.* --standby ", unit, re.MULTILINE)


def test_systemd_lands_the_source_that_the_instance_names() -> None:
    """`tidegate-land@shop:my-ticks` is the source my-ticks of the pipeline shop, with a checkpoint
    folder of its own.
    """
    unit = (DEPLOY / "systemd" / "tidegate-land@.service").read_text()
    assert "RestartPreventExitStatus=1 2 4\n" in unit
    (line,) = re.findall(r"^ExecStart=(.*)$", unit, re.MULTILINE)
    line = (
        line.replace("%i", "shop:my-ticks")
        .replace("%%", "%")
        .replace("$$", "$")
        .replace("/opt/tidegate/bin/tidegate", "/bin/echo")
    )
    done = subprocess.run(shlex.split(line), capture_output=True, text=True, timeout=60, check=True)
    folder = "/var/lib/tidegate/landing/shop/my-ticks"
    assert done.stdout.split() == [
        "land",
        "/etc/tidegate/pipelines/shop.yaml",
        "my-ticks",
        "--checkpoint",
        folder,
    ]


def test_chart_is_balanced() -> None:
    """Without helm at hand.

    Every block of every template ends, and every value that is asked for has a default.
    """
    values = YAML(typ="safe").load(DEPLOY / "helm" / "tidegate" / "values.yaml")
    for template in (DEPLOY / "helm" / "tidegate" / "templates").iterdir():
        text = template.read_text()
        opened = re.findall(r"\{\{-?\s*(?:if|range|with)\b", text)
        assert len(opened) == len(re.findall(r"\{\{-?\s*end\b", text)), template.name
        for path in re.findall(r"\.Values\.([A-Za-z.]+)", text):
            node: Any = values
            for part in path.split("."):
                assert part in node, f"{template.name}: {path}"
                node = node[part]


StoreAs = Callable[[Role], S3Store]


@pytest.fixture
def store_as(real_minio: RealMinio) -> StoreAs:
    """The shared MinIO's bucket, with the keys of a role for the pipeline `shop` in the store below
    `team`.
    """
    from minio import MinioAdmin
    from minio.credentials.providers import StaticProvider

    root, server = real_minio.server.root, real_minio.server
    keys = StaticProvider(root.access_key, root.secret_key)
    admin = MinioAdmin(
        endpoint=server.endpoint.removeprefix("http://"), credentials=keys, secure=False
    )

    def make(role: Role) -> S3Store:
        own = Credentials.generate(role.value)
        admin.user_add(own.access_key, own.secret_key)
        admin.policy_add(
            f"test-{role.value}",
            policy=build_policy(
                role, real_minio.bucket, "shop", prefix="team", inputs=["inbox/web"]
            ),
        )
        admin.policy_set(f"test-{role.value}", user=own.access_key)
        return store_with(real_minio.server.endpoint, real_minio.bucket, own, "team")

    return make


def store_with(endpoint: str, bucket: str, keys: Credentials, prefix: str) -> S3Store:
    """A store with these keys and little patience with failures; an answer may take its time."""
    fields = {
        "bucket": bucket,
        "prefix": prefix,
        "endpoint": endpoint,
        "region": REGION,
        "budget": 3.0,
    }
    fields |= {"connect_timeout": 30.0, "read_timeout": 60.0}
    return S3Store(
        S3Settings.model_validate(
            {**fields, "access_key": keys.access_key, "secret_key": keys.secret_key}
        )
    )


@pytest.mark.minio
def test_driver_can_drive_and_no_more(store_as: StoreAs, minio_environment: RealMinio) -> None:
    """A driver probes the store, writes below its pipeline's prefix and reads its inputs.

    It sees and touches nothing else, and deletes no document of its own.
    """
    whole = store_with(
        minio_environment.server.endpoint, minio_environment.bucket, minio_environment.app, "team"
    )
    whole.put("inbox/web/1.parquet", b"rows")
    whole.put("other/lease.json", b"{}")
    store = store_as(Role.DRIVER)
    require_honest_store(store)
    ensure_identity(store, "shop")
    assert SlotLog(store, "shop").head().slot == 0
    etag = store.create("shop/lease.json", b"1")
    store.compare_and_swap("shop/lease.json", b"2", etag)
    assert store.get("inbox/web/1.parquet").data == b"rows"
    assert [entry.key for entry in store.list_objects("inbox/web/")] == ["inbox/web/1.parquet"]
    refused: list[Callable[[], object]] = [
        lambda: store.delete("shop/lease.json"),
        lambda: store.put("inbox/web/2.parquet", b"x"),
        lambda: store.delete("inbox/web/1.parquet"),
        lambda: store.get("other/lease.json"),
        lambda: store.put("other/lease.json", b"x"),
        lambda: list(store.list_objects("other/")),
        lambda: list(store.list_objects("")),
    ]
    for ask in refused:
        with pytest.raises(StoreDeniedError):
            ask()


@pytest.mark.minio
def test_reader_reads_tables_only(store_as: StoreAs, minio_environment: RealMinio) -> None:
    """A reader gets the files of tables and what finds them, and can neither write nor read
    anything else.
    """
    whole = store_with(
        minio_environment.server.endpoint, minio_environment.bucket, minio_environment.app, "team"
    )
    table, pointer = (
        "shop/timelines/0/tables/events/000001-abc/part.parquet",
        "shop/iceberg/current.json",
    )
    for key in (table, pointer, "shop/roots.json", "shop/timelines/0/state/000001-abc/s.parquet"):
        whole.put(key, sha256_of_bytes(key.encode()).encode())
    store = store_as(Role.READER)
    assert store.get(table).data
    assert store.get(pointer).data
    for ask in (
        lambda: store.get("shop/roots.json"),
        lambda: store.put(table, b"x"),
        lambda: store.delete(table),
    ):
        with pytest.raises(StoreDeniedError):
            ask()


@pytest.mark.minio
def test_operator_asks_and_restores(store_as: StoreAs, minio_environment: RealMinio) -> None:
    """Airflow and the command line write requests, pins and the fork that is a restore.

    No table, no state, no delete.
    """
    whole = store_with(
        minio_environment.server.endpoint, minio_environment.bucket, minio_environment.app, "team"
    )
    whole.put("shop/identity.json", b"{}")
    store = store_as(Role.OPERATOR)
    assert store.get("shop/identity.json").data == b"{}"
    store.create("shop/requests/operator.json", b"{}")
    store.create("shop/timelines/7/slots/9999999998.json", b"{}")
    for ask in (
        lambda: store.put("shop/timelines/0/tables/events/x", b""),
        lambda: store.delete("shop/identity.json"),
    ):
        with pytest.raises(StoreDeniedError):
            ask()


@pytest.mark.minio
def test_tls_with_a_private_ca(tls_minio: CertifiedMinio, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the CA's file named, everything works over TLS; without, the error says what to name."""
    monkeypatch.setenv("AWS_CA_BUNDLE", str(tls_minio.ca))
    store = S3Store(tls_minio.settings())
    require_honest_store(store)
    assert store.create("p/x", b"1")
    monkeypatch.delenv("AWS_CA_BUNDLE")
    with pytest.raises(StoreUnavailableError, match=r"its certificate: .*AWS_CA_BUNDLE"):
        S3Store(tls_minio.settings().model_copy(update={"budget": 3.0})).put("p/y", b"1")


@pytest.mark.skipif(
    not (shutil.which("openssl") and shutil.which("keytool")),
    reason="openssl or keytool is not installed",
)
def test_an_expired_certificate_is_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A server whose certificate has run out is one that cannot be reached for now, and the reason
    is said.
    """
    bundle, pem = tmp_path / "old.p12", tmp_path / "old.pem"
    asked = (
        "-storepass secret -alias old -keyalg RSA -dname CN=127.0.0.1 -ext SAN=IP:127.0.0.1"
        " -startdate -10d -validity 5"
    )
    for command in (
        f"keytool -genkeypair -keystore {bundle} {asked}",
        f"openssl pkcs12 -in {bundle} -passin pass:secret -nodes -out {pem}",
    ):
        subprocess.run(command.split(), check=True, capture_output=True, timeout=240)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(pem)
    stop = threading.Event()
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(0.1)

        def serve() -> None:
            while not stop.is_set():
                with contextlib.suppress(
                    OSError
                ):  # the client turns away in the middle of the handshake
                    connection, _ = server.accept()
                    context.wrap_socket(connection, server_side=True).close()

        thread = threading.Thread(target=serve)
        thread.start()
        monkeypatch.setenv("AWS_CA_BUNDLE", str(pem))
        store = store_with(
            f"https://127.0.0.1:{server.getsockname()[1]}", "b", Credentials.generate("app"), ""
        )
        with pytest.raises(StoreUnavailableError, match="its certificate: certificate has expired"):
            store.put("p/x", b"1")
        stop.set()
        thread.join()


def test_executors_have_the_drivers_spark() -> None:
    """The image of the chart's executors is of the version that is locked."""
    values = YAML(typ="safe").load(DEPLOY / "helm" / "tidegate" / "values.yaml")
    assert values["executors"]["image"] == f"apache/spark:{version('pyspark')}"
