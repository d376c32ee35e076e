"""`tidegate whatif`: what it prints, and the errors of options that cannot be tried."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.cli.conftest import Cli
from tests.engine.harness import Bench, row

from tidegate.checkpoints.local_store import LocalStore
from tidegate.checkpoints.pipeline_identity import ensure_identity
from tidegate.jobs.cli.output import format_short_instant
from tidegate.jobs.spec.loader import parse_spec

SPEC = """\
apiVersion: tidegate/v1
name: shop
sources:
  web: &shop
    path: inbox/web/
    schema: {t: timestamp, v: long, kind: string, n: long}
    event_time: t
    lag: 5s
  store: {<<: *shop, path: inbox/store/}
coalesce: {idle_timeout: 20s}
"""


@pytest.fixture
def shop(store: LocalStore) -> Bench:
    """Twelve epochs in which the store falls silent and the web is up to twelve seconds late."""
    Path("shop.yaml").write_text(SPEC)
    ensure_identity(store, "shop")
    bench = Bench(parse_spec(SPEC), store)
    engine = bench.engine()
    for second in range(0, 60, 5):
        bench.clock.advance(5)
        bench.sources["web"].append(row(second), row(max(0, second - 12)))
        if second < 20:
            bench.sources["store"].append(row(second))
        engine.run_epoch()
    return bench


def test_other_options_are_shown_beside_what_happened(cli: Cli, shop: Bench) -> None:
    """A longer lag makes no row late and the delay longer; without a timeout no source is idle."""
    data = cli("whatif", "shop.yaml", "--lag", "web=10s", "--idle", "never", "--json").data
    assert (data["epochs"], data["reproduced"], data["rows_read"]["web"]) == (12, True, 24)
    assert data["rows_late"]["web"] > 0
    assert data["other"]["late"]["web"]["rows"] == [0, 0]
    assert (data["happened"]["idle"], data["other"]["idle"]) == ({"store": 2}, {})
    assert data["other"]["delay_p99_us"] > data["happened"]["delay_p99_us"]
    assert [point[0] for point in data["points"]] == list(range(1, 13))
    words = cli("whatif", "shop.yaml", "--lag", "web=10s", "--idle", "never").out
    assert "the recorded options give every recorded decision" in words
    assert "0 %" in words
    ends = next(line for line in words.splitlines() if "frontier at the end" in line).split()
    assert ends[-2:] == [format_short_instant(ticks) for ticks in data["points"][-1][2:]]


def test_a_shorter_timeout_is_a_range(cli: Cli, shop: Bench) -> None:
    """Rows between the least and the greatest time of an epoch may be late or not."""
    data = cli("whatif", "shop.yaml", "--lag", "web=0s", "--idle", "5s", "--json").data
    least, greatest = data["other"]["late"]["web"]["rows"]
    assert data["rows_late"]["web"] <= least <= greatest <= 24


@pytest.mark.parametrize(
    ("arguments", "code", "says"),
    [
        (["--lag", "wep=2m"], "whatif.unknown_source", "shop has no source 'wep'"),
        (["--idle", "wep=2m"], "whatif.unknown_source", "shop has no source 'wep'"),
        (["--lag", "2m"], "whatif.bad_option", "--lag '2m' cannot be read"),
        (["--lag", "web=2"], "whatif.bad_option", "--lag 'web=2' cannot be read"),
        (["--lag", "web=soon"], "whatif.bad_option", "--lag 'web=soon' cannot be read"),
        (["--idle", "0s"], "whatif.bad_option", "--idle '0s' cannot be read"),
    ],
)
def test_what_cannot_be_tried_is_one_clear_error(
    cli: Cli, shop: Bench, arguments: list[str], code: str, says: str
) -> None:
    """Unknown sources and durations that cannot be read are refused before anything is read."""
    said = cli("whatif", "shop.yaml", *arguments, "--json")
    assert said.exit_code == 2
    assert (said.data["code"], said.data["message"]) == (code, said.data["message"])
    assert says in said.data["message"]
