"""Where the page looks for a stream.

In the store of the Airflow connection that its DAG names, as the operators do.
"""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import pytest
from tests.operators.history import History
from tests.operators.pages import FakeAirflowQueries, app_of, served
from tests.servers.memory_store import MemoryStore

from tidegate.checkpoints.store import Store
from tidegate.errors import ConfigurationError
from tidegate.operators.airflow_port.database import AirflowQueries, _find_store_connection
from tidegate.operators.factory import build_dags

SPEC = """\
apiVersion: tidegate/v1
name: p
sources:
  one: {path: inbox/one, schema: {at: timestamp}, event_time: at, lag: 1m}
"""


class TwoStores(FakeAirflowQueries):
    """One stream in the environment's store, one in a connection's, one with a connection that
    no one made.
    """

    def __init__(self, own: Store, lake: Store) -> None:
        super().__init__(["away", "here", "there"], own)
        self._lake = lake

    def open_store(self, conn_id: str | None) -> Store:
        if conn_id == "nowhere":
            raise ConfigurationError(
                "Airflow knows no connection 'nowhere'", code="airflow.no_connection"
            )
        return self.store if conn_id is None else self._lake

    def list_streams(self, user: Any) -> list[dict[str, Any]]:
        places = {"away.stream": "nowhere", "here.stream": None, "there.stream": "lake"}
        return [
            {**stream, "conn_id": places[stream["dag_id"]]} for stream in super().list_streams(user)
        ]


def _get(url: str) -> Any:
    with urllib.request.urlopen(url) as answer:
        return json.load(answer)


def test_each_stream_is_looked_for_in_its_own_store() -> None:
    """One list has the streams of several stores.

    One without a store says why and takes nothing from the others.
    """
    own, lake = MemoryStore(), MemoryStore()
    History(own, "here").extend(2)
    History(lake, "there").extend(5)
    with served(app_of(TwoStores(own, lake))) as url:
        rows = {row["pipeline"]: row for row in _get(f"{url}/api/streams")["streams"]}
        checkpoints = _get(f"{url}/api/streams/there.stream/checkpoints")
    assert (rows["away"]["state"], rows["away"]["why"]) == (
        "unknown",
        "Airflow knows no connection 'nowhere'",
    )
    assert {name: rows[name]["slot"] for name in ("here", "there")} == {"here": 2, "there": 5}
    assert checkpoints["newest"] == 5


def test_data_docs_need_the_right_to_the_quality_dag() -> None:
    """The right to see a DAG that is called like the pipeline gives nothing."""
    store = MemoryStore()
    store.put("here/quality/docs/index.html", b"rows")
    with served(app_of(FakeAirflowQueries(["here"], store))) as url:
        with urllib.request.urlopen(f"{url}/docs/here.quality/") as answer:
            assert answer.read() == b"rows"
            policy = answer.headers["Content-Security-Policy"]
            assert {"sandbox", "form-action 'none'", "base-uri 'none'"} <= {*policy.split("; ")}
        for other in ("here", "here.stream"):
            with pytest.raises(urllib.error.HTTPError) as refused:
                urllib.request.urlopen(f"{url}/docs/{other}/")
            refused.value.close()
            assert refused.value.code == 404


def test_the_dag_names_its_connection(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The factory notes it in a tag, the API server reads it there and opens the store.

    Without one it is the environment's.
    """
    (tmp_path / "p.yaml").write_text(SPEC)
    named = build_dags(tmp_path, conn_id="lake")["p.stream"].tags
    assert _find_store_connection(named) == "lake"
    assert _find_store_connection(build_dags(tmp_path)["p.stream"].tags) is None
    monkeypatch.setenv(
        "AIRFLOW_CONN_LAKE",
        json.dumps({"conn_type": "aws", "extra": {"store": str(tmp_path / "lake")}}),
    )
    assert AirflowQueries().open_store("lake").uri("x").endswith("/lake/x")


def test_a_connection_that_names_no_store_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """It says what to put into the connection's extra."""
    monkeypatch.setenv("AIRFLOW_CONN_LAKE", json.dumps({"conn_type": "aws", "login": "x"}))
    with pytest.raises(ConfigurationError, match="'lake' has no 'store' in its extra"):
        AirflowQueries().open_store("lake")
