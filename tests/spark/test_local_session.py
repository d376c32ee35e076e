"""The jobs of tasks in this process give what the oracle gives, without a JVM."""

from __future__ import annotations

import math
import re
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from pydantic import SecretStr

from tests.spark.agreement import SECOND, Pair, divide_finely, spec_of
from tests.spark.edge_cases import run_case
from tidegate.checkpoints.executor_keys import EXECUTOR_VARIABLES
from tidegate.checkpoints.local_store import LocalStore
from tidegate.checkpoints.s3_store import S3Settings
from tidegate.errors import ConfigurationError
from tidegate.jobs.rows import batch_reading
from tidegate.jobs.rows.event_files import RANGE_BYTES
from tidegate.jobs.rows.slice_scan import MOST_CELLS
from tidegate.jobs.sealed_queries.s3a_settings import build_s3a_settings
from tidegate.jobs.spark import shared_store, task_events
from tidegate.jobs.spark.local_session import LocalContext, LocalRows, LocalSession
from tidegate.jobs.spark.python_tasks import prepare_context
from tidegate.jobs.spark.shared_store import require_shared_store
from tidegate.jobs.spark.spark_session import _SETTINGS

AGGREGATES = {"n": "count(*)", "s": "sum(v)", "low": "min(n)"}
WINDOWS = {
    "t": {"kind": "tumbling", "size": "10s", "keys": ["k"], "aggregates": AGGREGATES},
    "l": {"kind": "sliding", "size": "10s", "slide": "5s", "aggregates": AGGREGATES},
    "s": {"kind": "session", "gap": "3s", "keys": ["k"], "aggregates": AGGREGATES},
}
EPOCHS = ((1, 4, 12), (13, 31, 8), (2, 33, 60), (61, 50, 90))
"""Seconds of the rows of each epoch; some of them are late."""


def row(second: int) -> dict[str, Any]:
    """A data row."""
    key = "xyz"[second % 3]
    return {"t": second * SECOND, "kind": "data", "k": key, "n": second, "v": second / 2}


@pytest.mark.parametrize("shared", [False, True], ids=["whole", "shared"])
@pytest.mark.parametrize(
    ("release", "range_bytes", "most_cells"),
    [
        ({"mode": "ordered", "glom": {"dt": "2s", "max_rows": 3}}, 1, MOST_CELLS),
        ({"mode": "ordered", "glom": {"dt": "20s", "stamp": "mean"}}, RANGE_BYTES, 10),
        ({"on_late": "emit_flagged", "glom": {"dt": "2s", "stamp": "latest"}}, 1, 5),
        ({"mode": "pass_through"}, RANGE_BYTES, MOST_CELLS),
    ],
)
def test_tasks_in_this_process_agree_with_the_oracle(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    *,
    release: dict[str, Any],
    range_bytes: int,
    most_cells: int,
    shared: bool,
) -> None:
    """In order by one task or by ranges, with built events, as rows come, and in batches.

    A task reads whole slices, or two rows.
    """
    if shared:
        divide_finely(monkeypatch)
    monkeypatch.setattr(task_events, "RANGE_BYTES", range_bytes)
    monkeypatch.setattr(batch_reading, "MOST_CELLS", most_cells)
    rules = {"known": {"predicate": "n <> 31"}}
    spec = spec_of({"a": {"lag": "2s"}, "b": {"rules": rules}}, windows=WINDOWS, release=release)
    session: Any = LocalSession()
    pair = Pair(spec, session, tmp_path)
    with closing(pair.spark):
        for number, seconds in enumerate(EPOCHS):
            pair.put("a", [row(second) for second in seconds])
            pair.put("b", [row(second + 1) for second in seconds])
            pair.run(number * SECOND, done=number == len(EPOCHS) - 1)
    assert any(moved.counters.late_by_output for moved in pair.sides["spark"].moved)
    assert bool(pair.table("built")) == ("glom" in release)


def test_keys_of_floats_agree_with_the_oracle(tmp_path: Path) -> None:
    """All NaN are one key, also those of state, and -0.0 is 0.0."""
    session: Any = LocalSession()
    keyed = {name: {**window, "keys": ["v"]} for name, window in WINDOWS.items()}
    pair = Pair(spec_of(windows=keyed), session, tmp_path)
    values = [0.1, 0.0, -0.0, math.nan, -math.nan, None, 0.1]
    with closing(pair.spark):
        for number in range(4):
            rows = [{**row(number * 4 + i), "v": value} for i, value in enumerate(values)]
            pair.put("a", rows)
            pair.put("b", rows[::-1])
            pair.run(number * SECOND, done=number == 3)
    keys = {str(found["v"]) for found in pair.table("t")}
    assert keys == {"0.0", "0.1", "nan", "None"}


@pytest.mark.parametrize(("most_cells", "shared"), [(MOST_CELLS, False), (10, False), (10, True)])
def test_edges_agree_with_the_oracle(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, most_cells: int, shared: bool
) -> None:
    """Tasks pair the edges of a batch, and the driver what is open with the first end."""
    monkeypatch.setattr(batch_reading, "MOST_CELLS", most_cells)
    if shared:
        divide_finely(monkeypatch)
    session: Any = LocalSession()
    run_case(session, tmp_path, seed=0, epochs=4)


class Cluster(LocalContext):
    """Executors on other hosts, whose environment is this one."""

    master = "spark://far:7077"


@pytest.mark.parametrize("variable", [None, *EXECUTOR_VARIABLES])
def test_executors_with_keys_of_their_own_are_sent_none(
    monkeypatch: pytest.MonkeyPatch, variable: str | None
) -> None:
    """They get the region and the endpoint of the store; others get the driver's keys as well."""
    given = {
        "TIDEGATE_S3_ACCESS_KEY": "a driver's",
        "TIDEGATE_S3_SECRET_KEY": "a secret",
        "TIDEGATE_S3_REGION": "eu-west-1",
        "AWS_SESSION_TOKEN": "a token",
        "AWS_ENDPOINT_URL_S3": "https://minio.example.org",
    }
    for name, text in given.items():
        monkeypatch.setenv(name, text)
    if variable is not None:
        monkeypatch.setenv(variable, "narrow")
    session: Any = LocalSession()
    session.sparkContext = Cluster()
    sent = prepare_context(session, {"KAFKA": "password"}).environment
    shared = {"TIDEGATE_S3_REGION", "AWS_ENDPOINT_URL_S3"}
    assert set(given) & set(sent) == (set(given) if variable is None else shared)
    assert "narrow" not in sent.values()
    assert sent["KAFKA"] == "password"


def test_spark_masks_each_setting_of_s3a_that_holds_a_key() -> None:
    """On its pages and in its event log, whose entries it masks by the name of the setting."""
    keys = {"access_key": "who", "secret_key": SecretStr("what"), "session_token": SecretStr("t")}
    given = build_s3a_settings(S3Settings.model_validate({"bucket": "b", **keys}))
    holders = [name for name, text in given.items() if text in ("who", "what", "t")]
    assert len(holders) == 3
    masked = re.compile(_SETTINGS["classic"]["spark.redaction.regex"])
    assert [name for name in holders if masked.search(name) is None] == []
    assert masked.search("fs.s3a.endpoint") is None


@pytest.mark.parametrize("has_folder", [True, False])
def test_a_folder_that_the_hosts_do_not_share_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, has_folder: bool
) -> None:
    """A host may have no such folder, or another one at the same path. Nothing is left in the store."""
    spec = spec_of(spark={"master": "spark://far:7077"})
    session: Any = LocalSession()
    store, there = LocalStore(tmp_path / "store"), tmp_path / "there"
    require_shared_store(session, spec, store)
    session.sparkContext.parallelize = lambda paths, parts: LocalRows(
        lambda: [[Elsewhere(path)] for path in paths], parts
    )

    class Elsewhere(str):
        """A path, as another host sees it."""

        def __fspath__(self) -> str:
            path = there / Path(str(self)).relative_to(tmp_path)
            if has_folder:
                path.parent.mkdir(parents=True, exist_ok=True)
            return str(path)

    monkeypatch.setattr(shared_store, "Path", lambda path: Path(path.__fspath__()))
    cause = "does not see what it wrote" if has_folder else "No such file"
    with pytest.raises(ConfigurationError, match=cause) as found:
        require_shared_store(session, spec, store)
    assert found.value.code == "spark.no_shared_store"
    assert list(store.list_objects("")) == []


def test_spark_sql_is_refused_by_the_name_of_what_it_needs(tmp_path: Path) -> None:
    """So a test that leaves the kernel fails, instead of computing something else."""
    session: Any = LocalSession()
    name, window = next(iter(WINDOWS.items()))
    windows = {name: {**window, "aggregates": {"middle": "sql(percentile(v, 0.5))"}}}
    pair = Pair(spec_of(windows=windows), session, tmp_path)
    pair.put("a", [row(1), row(90)])
    with closing(pair.spark), pytest.raises(AttributeError, match="LocalSession"):
        pair.run(0, done=True)
