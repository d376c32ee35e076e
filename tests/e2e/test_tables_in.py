"""A Delta and an Iceberg table as sources of one pipeline on real Spark, with a kill, a compaction
and an append in between.
"""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from pathlib import Path

import deltalake
import pyarrow as pa
import pytest
from pyiceberg.catalog.sql import SqlCatalog

from tests.e2e.drivers import SIGKILLED, Piped
from tidegate.jobs.sinks.exactness_audit import audit_exactness
from tidegate.jobs.sources.input_view import InputView

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(1800)]

START = datetime(2026, 3, 1, tzinfo=UTC)
SPEC = """\
apiVersion: tidegate/v1
name: lake
sources:
  orders: &table
    path: {folder}/orders
    table: {{format: delta}}
    schema: {{at: timestamp, shop: string, amount: long}}
    event_time: at
    lag: 1h
    limits: {{objects: 2}}
  returns:
    <<: *table
    path: {folder}/returns
    table: {{format: iceberg, catalog: "sqlite:///{folder}/catalog.sqlite", name: shop.returns}}
coalesce: {{idle_timeout: never}}
windows:
  per_shop: {{kind: tumbling, size: 1m, keys: [shop], aggregates: {{n: count(*), total: sum(amount)}}}}
checkpoint: {{idle_interval: 100ms}}
spark: {{driver_memory: 1g, jvm: quick}}
"""


def rows(*minutes: int) -> pa.Table:
    """Two rows a minute."""
    stamps = [START + timedelta(minutes=m, seconds=s) for m in minutes for s in (1, 2)]
    amounts = pa.array([m for m in minutes for _ in "12"], pa.int64())
    shops = ["ab"[m % 2] for m in minutes for _ in "12"]
    return pa.table(
        {"at": pa.array(stamps, pa.timestamp("us", tz="UTC")), "shop": shops, "amount": amounts}
    )


def test_two_tables(tmp_path: Path) -> None:
    """Each appended row comes once, whatever was killed, compacted and appended.

    Partition values are columns like others.
    """
    lake = tmp_path / "lake"
    lake.mkdir()
    catalog = SqlCatalog("default", uri=f"sqlite:///{lake / 'catalog.sqlite'}", warehouse=str(lake))
    catalog.create_namespace("shop")
    returns = catalog.create_table("shop.returns", rows(0).schema, location=str(lake / "returns"))
    for minute in range(6):
        deltalake.write_deltalake(
            str(lake / "orders"), rows(minute), mode="append", partition_by=["shop"]
        )
        returns.append(rows(minute))
    pipeline = Piped(tmp_path / "p", SPEC.format(folder=lake))
    assert pipeline.run("move.done:2", "--until-idle", "1") == SIGKILLED, pipeline.log_text()
    deltalake.DeltaTable(str(lake / "orders")).optimize.compact()
    deltalake.write_deltalake(
        str(lake / "orders"), rows(6, 7, 200), mode="append", partition_by=["shop"]
    )
    returns.append(rows(7, 200))
    assert pipeline.run("", "--until-idle", "1") == 0, pipeline.log_text()
    found = sorted(
        (row["window_start"], row["shop"], row["n"], row["total"])
        for row in pipeline.table("per_shop").to_pylist()
    )
    twice = dict.fromkeys(range(8), 2) | {6: 1}
    assert found == [
        (START + timedelta(minutes=m), "ab"[m % 2], 2 * n, 2 * n * m) for m, n in twice.items()
    ]
    assert (pipeline.table("late").num_rows, pipeline.table("dead_letters").num_rows) == (0, 0)
    view = InputView(pipeline.store(), pipeline.spec, tmp_path / "view")
    assert audit_exactness(pipeline.spec, view, pipeline.log(), pipeline.table).problems == []
    catalog.close()
