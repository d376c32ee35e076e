"""`tidegate support-bundle`: everything a helper needs, no rows, no secrets."""

from __future__ import annotations

import importlib
import json
import sys
import zipfile
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from urllib.parse import quote, quote_plus

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.cli.conftest import Cli, seal

from tidegate.checkpoints.checkpoint_specs import write_spec
from tidegate.checkpoints.slot_log import SlotLog
from tidegate.jobs.cli.support_bundle import SecretMasker
from tidegate.jobs.spec.loader import load_spec

PLANTED = (
    "hunter2-of-minio",
    "s3cr3t-in-the-url",
    "kafka-pass-phrase",
    "spark-conf-value",
    "bearer-0123456789",
    "s-own-word",
)
KAFKA = """\
apiVersion: tidegate/v1
name: flights
sources:
  EWR:
    kind: kafka
    kafka:
      servers: broker:9092
      topic: t
      options:
        sasl.jaas.config: "Login required password=kafka-pass-phrase;"
        ssl.key.password: "env:KEY_PASSWORD"
        ssl.provider: "env:BROKER"
    schema: {sched: timestamp, carrier: string}
    event_time: sched
    lag: 1h
outputs: {catalog: "postgresql://me:s3cr3t-in-the-url@db/catalog"}
spark: {conf: {spark.hadoop.fs.s3a.secret.key: spark-conf-value}}
"""


def bundle(cli: Cli, folder: Path, pipeline: str = "flights.yaml") -> dict[str, str]:
    """Name -> text of every file in a fresh bundle."""
    said = cli("support-bundle", pipeline, "--out", "b.zip")
    assert said.exit_code == 0, said.err
    with zipfile.ZipFile(folder / "b.zip") as files:
        return {name: files.read(name).decode() for name in files.namelist()}


def test_no_secret_gets_in(
    cli: Cli, log: SlotLog, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Secrets of the environment, of the spec and of logs are masked, in every place.

    Other values stay.
    """
    monkeypatch.setenv("TIDEGATE_S3_SECRET_KEY", "hunter2-of-minio")
    monkeypatch.setenv("TIDEGATE_S3_ENDPOINT", "http://minio:9000")
    monkeypatch.setenv("UNRELATED", "not-ours")
    (tmp_path / "flights.yaml").write_text(KAFKA)
    monkeypatch.setenv("BROKER", 'broker"s-own-word')
    lines = [
        "connecting with hunter2-of-minio",
        json.dumps({"event": 'Login required password="kafka-pass-phrase" user="me"'}),
        json.dumps({"event": 'the broker said broker"s-own-word'}),
        "catalog postgresql://me:s3cr3t-in-the-url@db/catalog",
        'api_key="bearer-0123456789"',
    ]
    log.store.put(f"{log.layout.logs_prefix}a/driver.log", "\n".join(lines).encode())
    files = bundle(cli, tmp_path)
    whole = "\n".join(files.values())
    assert [secret for secret in PLANTED if secret in whole] == []
    assert "not-ours" not in whole
    assert json.loads(files["environment.json"])["TIDEGATE_S3_ENDPOINT"] == "http://minio:9000"
    assert "connecting with ***" in files["flights/logs/a/driver.log"]
    assert "env:KEY_PASSWORD" in files["spec.json"]


def test_what_is_in_it(cli: Cli, log: SlotLog, spec_file: Path, tmp_path: Path) -> None:
    """Versions, spec, the newest manifests and the documents of the bucket are there.

    No table file is.
    """
    files = bundle(cli, tmp_path)
    assert {"versions.json", "environment.json", "spec.json", "flights/identity.json"} <= set(files)
    assert sum(name.startswith("slots/") for name in files) == 3
    assert json.loads(files["slots/0000000003.json"])["counters"]["read"] == 30
    assert json.loads(files["overview.json"])["state"] == "stopped"
    assert not [name for name in files if name.endswith(".parquet")]


def test_a_broken_installation_does_not_stop_the_bundle(
    cli: Cli, log: SlotLog, spec_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A package without a name is left out; of two with one name the imported one counts."""
    importlib.import_module("importlib_metadata")  # it raises for a package without a name
    (tmp_path / "broken-1.0.dist-info").mkdir()
    (tmp_path / "pydantic-0.1.dist-info").mkdir()
    text = "Metadata-Version: 2.1\nName: pydantic\nVersion: 0.1\n"
    (tmp_path / "pydantic-0.1.dist-info/METADATA").write_text(text)
    monkeypatch.setattr(sys, "path", [*sys.path, str(tmp_path)])
    packages = json.loads(bundle(cli, tmp_path)["versions.json"])["packages"]
    assert packages["pydantic"] == version("pydantic")
    assert "broken" not in packages


def test_a_name_suffices_in_a_folder_without_the_spec(
    cli: Cli, log: SlotLog, spec_file: Path, tmp_path: Path
) -> None:
    """The spec that sealed the newest epoch is in the store, so a person needs no file."""
    files = bundle(cli, tmp_path)
    spec = load_spec(spec_file)
    seal(log, spec_digest=spec.digest())
    write_spec(log.store, spec)
    spec_file.unlink()
    assert set(bundle(cli, tmp_path, "flights")) - set(files) == {"slots/0000000004.json"}
    assert cli("status", "flights", "--json").data["landings"] == {}


def test_masker_leaves_words_alone() -> None:
    """A short secret is masked under its name only.

    As a word elsewhere it would tear holes into everything.
    """
    masker = SecretMasker({"DB_PASSWORD": "test"})
    assert masker.mask_text("the test of a test") == "the test of a test"
    assert masker.mask_document({"password": "test", "count": 3, "lease_token": 7}) == {
        "password": "***",
        "count": 3,
        "lease_token": 7,
    }


MARK = "Zq7xWv"
SIGNS = [
    '"',
    "'",
    "\\",
    " ",
    "/",
    ":",
    "@",
    "&",
    "=",
    "%",
    ",",
    ";",
    "}",
    "+",
    "é",
    "\u2028",
    "\N{GRINNING FACE}",
]
ENCODERS: tuple[Callable[[str], str], ...] = (
    lambda text: json.dumps({"event": text, "at": 1}),
    lambda text: json.dumps({"event": text}, ensure_ascii=False)[
        3:
    ],  # as in a line that a log's tail begins with
    lambda text: repr({"why": text}),
    lambda text: f"GET /?next={quote(text, safe='')}",
    lambda text: f"GET /?next={quote_plus(text)}",
    lambda text: f"before\n2026-05-01 12:00:00 [info] {text}\nafter",
)


@st.composite
def secrets(draw: st.DrawFn, without: str = "") -> str:
    """Something secret with signs in it.

    Each part of it holds the mark, so that none may be seen.
    """
    signs = draw(
        st.lists(st.sampled_from([sign for sign in SIGNS if sign not in without]), max_size=4)
    )
    return MARK + "".join(sign + MARK for sign in signs)


def query(secret: str, name: str) -> str:
    """A signed address."""
    return f"https://host/bucket/key?X-Amz-Date=1&{name}={quote(secret, safe='')}&X-Amz-Expires=9"


def quoted(secret: str, sign: str) -> str:
    """A literal."""
    return sign + secret.replace("\\", "\\\\").replace(sign, "\\" + sign) + sign


QUERIES = ("X-Amz-Signature", "X-Amz-Credential", "X-Amz-Security-Token")
SHAPES = st.one_of(
    secrets("\"' ").map(lambda s: f"connecting with password={s} now"),
    secrets().map(lambda s: f"api_key: {quoted(s, chr(34))} was refused"),
    secrets().map(lambda s: f"{{'client-secret' : {quoted(s, chr(39))}, 'port': 9}}"),
    secrets().map(lambda s: json.dumps({"sasl.jaas.config": s, "nested": [{"db_password": [s]}]})),
    secrets().map(lambda s: f"Authorization: Bearer {s}"),
    secrets(" \u2028").map(lambda s: f"sent ('Auth', 'bearer {s}') to the server"),
    secrets().map(
        lambda s: (
            f"authorization: AWS4-HMAC-SHA256 Credential={s}, SignedHeaders=host, Signature={s}"
        )
    ),
    secrets(' "\u2028').map(
        lambda s: f"catalog postgresql+psycopg://me:{s}@db:5432/catalog is away"
    ),
    secrets(' "/@:%\u2028').map(lambda s: f"cloned https://{s}@host/x"),
    st.tuples(secrets(), st.sampled_from(QUERIES)).map(lambda drawn: query(*drawn)),
    secrets().map(
        lambda s: f"-----BEGIN RSA PRIVATE KEY-----\n{s}\n{s}\n-----END RSA PRIVATE KEY----- loaded"
    ),
)


@given(SHAPES, st.lists(st.sampled_from(ENCODERS), max_size=3))
@settings(deadline=None)
def test_a_secret_is_known_by_its_place(text: str, wraps: list[Callable[[str], str]]) -> None:
    """Behind its name, in a header, an address, a signed address or a key.

    Also within JSON and addresses, to any part of it.
    """
    for wrap in wraps:
        text = wrap(text)
    masker = SecretMasker({})
    assert MARK not in masker.mask_text(text)
    assert MARK not in json.dumps(masker.mask_document({"log": [text]}))


@given(secrets(), st.lists(st.sampled_from(ENCODERS), max_size=3))
@settings(deadline=None)
def test_a_known_secret_is_masked_anywhere(secret: str, wraps: list[Callable[[str], str]]) -> None:
    """What the environment holds under a secret's name, or the spec names, is found without a name
    beside it, in any encoding.
    """
    text = f"tried {secret} once"
    for wrap in wraps:
        text = wrap(text)
    for masker in (
        SecretMasker({"BROKER_PASSWORD": secret}),
        SecretMasker({"BROKER": secret}, ["BROKER"]),
    ):
        assert MARK not in masker.mask_text(text)
        assert MARK not in json.dumps(masker.mask_document({secret: [text]}))
