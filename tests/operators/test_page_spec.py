"""The file of a spec on the page: found as people write it, without an error of the server."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from starlette.testclient import TestClient
from tests.operators.pages import FakeAirflowQueries, app_of
from tests.servers.memory_store import MemoryStore

from tidegate.checkpoints.deployed_specs import Deploy, confirm_deploy, make_copy, write_copy
from tidegate.jobs.spec.loader import load_any_spec, parse_spec

SPEC = """\
apiVersion: tidegate/v1
name: orders
sources:
  b: {path: in/b, schema: {t: timestamp, v: double}, event_time: t, lag: 1s}
"""


@pytest.fixture
def specs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TIDEGATE_PIPELINES", str(tmp_path))
    return tmp_path


def _ask() -> Any:
    with TestClient(app_of(FakeAirflowQueries(["orders"], MemoryStore()))) as page:
        return page.get("/api/streams/orders.stream/spec")


@pytest.mark.parametrize(
    "text",
    [
        "apiVersion: tidegate/v1\nname: orders # ours\n",
        "{apiVersion: tidegate/v1, name: orders, sources: {}}\n",
        '{\n  "apiVersion": "tidegate/v1",\n  "name": "orders"\n}\n',
        "name: 'orders'\nsources: [\n",
    ],
)
def test_a_spec_is_found_in_each_style_of_yaml(specs: Path, text: str) -> None:
    """Another file may name the pipeline further in, and may not be shown for it."""
    (specs / "a.yaml").write_text("name: orders_old\nsources: {b: {name: orders}}\n")
    (specs / "b.yaml").write_text(text)
    answer = _ask()
    assert answer.status_code == 200, answer.text
    assert answer.json()["file"] == str(specs / "b.yaml")


def test_a_file_that_cannot_be_read_is_named(specs: Path) -> None:
    """A folder in the place of a file: the tests may run as root, who can read every file."""
    (specs / "a.yaml").mkdir()
    answer = _ask()
    assert answer.status_code == 404
    assert f"{specs / 'a.yaml'} could not be read" in answer.text
    (specs / "b.yaml").write_text("name: orders\n")
    assert _ask().status_code == 200


@pytest.mark.parametrize(
    ("text", "told"),
    [
        (SPEC, []),
        (SPEC.replace("lag: 1s", "lag: 5s"), ["sources.b.lag"]),
        ("name: orders\nsources: [\n", []),
        (None, []),
    ],
)
def test_a_file_that_waits_for_a_deploy_is_told(
    specs: Path, text: str | None, told: list[str]
) -> None:
    """With the fields that differ; a file that is broken or elsewhere is not compared."""
    store, copy = MemoryStore(), make_copy(parse_spec(SPEC), {})
    write_copy(store, "orders", copy)
    confirm_deploy(store, "orders", Deploy(digest=copy.digest, who="olga", at=1))
    if text is not None:
        (specs / "orders.yaml").write_text(text)
    with TestClient(app_of(FakeAirflowQueries(["orders"], store))) as page:
        row = page.get("/api/streams").json()["streams"][0]
    found = [one["says"] for one in row["findings"] if "waits for tidegate deploy" in one["says"]]
    assert len(found) == len(told)
    assert all(field in says for field, says in zip(told, found, strict=True))


def test_a_changed_script_of_a_job_is_told(specs: Path) -> None:
    """With the number of its lines that changed."""
    spec = "apiVersion: tidegate/v1\nkind: job\nname: orders\napp: job.py\n"
    (specs / "orders.yaml").write_text(spec)
    store = MemoryStore()
    copy = make_copy(load_any_spec(specs / "orders.yaml"), {"job.py": "x = 1\n"})
    write_copy(store, "orders", copy)
    confirm_deploy(store, "orders", Deploy(digest=copy.digest, who="olga", at=1))
    (specs / "job.py").write_text("x = 2\n")
    with TestClient(app_of(FakeAirflowQueries(["orders"], store))) as page:
        row = page.get("/api/streams").json()["streams"][0]
    assert any("code job.py: 1 lines added, 1 removed" in one["says"] for one in row["findings"])
