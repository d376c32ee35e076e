from __future__ import annotations

from pathlib import Path

import pytest
from tests.cli.conftest import Cli, seal

from tidegate.checkpoints.slot_log import SlotLog

SKETCH = {
    "EWR": {"gamma": 1.01, "buckets": {"0": 950, "1801": 49, "2332": 1}}
}  # a minute, and about three and a half hours


@pytest.fixture
def sketched(log: SlotLog) -> SlotLog:
    """Three epochs without a sketch and two with one."""
    for _ in range(2):
        seal(log, sketches=SKETCH)
    return log


def test_lags_and_cost_as_json(cli: Cli, sketched: SlotLog, spec_file: Path) -> None:
    """The lag for each share, the present lag's share and delay, and the curve, in the envelope."""
    data = cli("advise", str(spec_file), "--json").data
    assert (data["pipeline"], data["epochs"], data["last_slot"]) == ("flights", 5, 5)
    source = data["sources"]["EWR"]
    assert (source["rows"], source["rows_read"], source["rows_late"]) == (2000, 50, 5)
    assert source["present"] == {
        "lag_us": 3_600_000_000,
        "delay_us": 3_600_000_000,
        "late_share": 0.001,
    }
    lags = [target["lag_us"] for target in source["targets"]]
    assert 60_000_000 <= lags[0] == lags[1] <= 60_600_000
    assert lags[2] > 3_600_000_000
    assert source["targets"][2]["more_delay_us"] == lags[2] - 3_600_000_000
    assert [point["late_share"] for point in source["curve"]] == [0.05, 0.001, 0.0]


def test_words_name_what_a_lag_costs(cli: Cli, sketched: SlotLog, spec_file: Path) -> None:
    """People read the lags, and what they cost or save in delay."""
    out = cli("advise", str(spec_file)).out
    assert "lag for 0.01 % late" in out
    assert "lag now  late with it, at most  late so far" in out
    assert not out.endswith("\n\n")
    assert "results wait 1h for late rows; 59m less for 1 % late" in out


def test_by_name_without_a_spec_the_lag_is_unknown(cli: Cli, sketched: SlotLog) -> None:
    """The log alone knows the rows, not the spec."""
    out = cli("advise", "flights").out
    assert "unknown" in out
    assert "give the path of the spec" in out


def test_only_the_newest_epochs(cli: Cli, sketched: SlotLog) -> None:
    """Old habits of a source can be left out."""
    data = cli("advise", "flights", "--epochs", "1", "--json").data
    assert (data["epochs"], data["sources"]["EWR"]["rows"]) == (1, 1000)


def test_no_sketch_is_reported(cli: Cli, log: SlotLog) -> None:
    """Without sketches the command gives no advice and draws no picture."""
    assert "no lateness sketch in 3 epochs" in cli("advise", "flights").out
    said = cli("advise", "flights", "--plot", "curve.svg")
    assert (said.exit_code, "nothing" in said.err or "no lateness sketch" in said.err) == (2, True)


@pytest.mark.parametrize(("name", "start"), [("curve.svg", b"<?xml"), ("curve.png", b"\x89PNG")])
def test_picture_is_drawn(
    cli: Cli, sketched: SlotLog, spec_file: Path, name: str, start: bytes
) -> None:
    """The curve can be looked at, in either form."""
    assert "drawn" in cli("advise", str(spec_file), "--plot", name).out
    assert Path(name).read_bytes().startswith(start)


def test_other_pictures_are_refused(cli: Cli, sketched: SlotLog) -> None:
    """A file name without a known form is the user's mistake, said so."""
    said = cli("advise", "flights", "--plot", "curve.pdf")
    assert (said.exit_code, ".png or .svg" in said.err) == (2, True)
