"""`tidegate splice` and `tidegate row` on a store with real objects and real Iceberg tables.

Only Spark is not there.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tests.cli.conftest import Cli, Said
from tests.cli.shop import OBJECTS, SPEC, Shop

from tidegate.checkpoints.local_store import LocalStore
from tidegate.jobs.spec.loader import load_spec


@pytest.fixture
def shop(store: LocalStore, tmp_path: Path) -> Shop:
    path = tmp_path / "shop.yaml"
    path.write_text(SPEC)
    found = Shop(store, load_spec(path), tmp_path / "work")
    for number, rows in enumerate(OBJECTS):
        found.put(number, rows)
    found.run()
    return found


def _ask(cli: Cli, *arguments: str) -> str:
    return str(cli("splice", *arguments, "--json").data["request"])


def test_late_rows_come_back(cli: Cli, shop: Shop) -> None:
    """Ask, look, merge.

    The tables then are exact with the rows in their places, and the old version stays readable.
    """
    before, slot = shop.results(), shop.log.head().slot
    assert shop.exact() == []
    request = _ask(cli, "late", "shop.yaml", "--why", "the till was offline")
    shown = cli("splice", "show", "shop.yaml", request, "--html", "report.html")
    assert "hourly: 1 added, 1 changed" in shown.out
    assert "item=tea 2026-05-01T10:00:00Z  sold: 2 -> 3, revenue: 7 -> 9  (revision 1)" in shown.out
    assert shop.results() == before, "looking changes nothing"
    said = cli("splice", "merge", "shop.yaml", request, "--yes")
    assert "exactly what the report said" in said.out
    assert shop.results() == {**before, ("10", "tea"): (3, 9, 4), ("11", "cup"): (1, 8, 8)}
    assert shop.results(at=slot) == before
    assert shop.exact() == []
    assert [(r["position"], f"{r['at']:%H:%M}") for r in shop.table("events")][:4] == [
        (0, "10:05"), (1, "10:20"), (2, "10:40"), (3, "11:15"),
    ]  # fmt: skip
    assert [r["position"] for r in shop.table("events", at=slot)] == list(range(5))
    assert [r["position"] for r in shop.scan("events", spliced=False)] == list(range(5))
    assert "<svg" in Path("report.html").read_text()


def test_a_merge_asks_on_standard_error_with_json(cli: Cli, shop: Shop) -> None:
    """Standard output has the envelope alone; report and question are for the person."""
    request = _ask(cli, "late", "shop.yaml")
    said = cli("splice", "merge", "shop.yaml", request, "--json", input="y\n")
    # The runner of the tests writes the answer to standard output.
    envelope = said.out.strip().removeprefix("y").strip()
    assert json.loads(envelope)["data"]["request"] == request
    assert "hourly: 1 added, 1 changed" in said.err
    assert "Merge?" in said.err


def test_a_driver_goes_on_above_a_merge(cli: Cli, shop: Shop) -> None:
    """New epochs land on top of a merge, in the log and in the tables.

    Files without the new column still fit.
    """
    request = _ask(cli, "late", "shop.yaml")
    assert cli("splice", "merge", "shop.yaml", request, "--yes").exit_code == 0
    shop.put(4, [("23:30", "tea", 6), ("23:59", "tea", 1)])
    while not shop.engine.run_epoch().sealed:
        pass
    shop.run()
    assert shop.exact() == []
    assert [r["position"] for r in shop.table("events")] == list(range(len(shop.table("events"))))


def test_rejected_requests_change_nothing(cli: Cli, shop: Shop) -> None:
    """A rejected request cannot be merged.

    Its rows can be asked for again; who and why are kept.
    """
    before = shop.results()
    request = _ask(cli, "late", "shop.yaml")
    assert cli("splice", "reject", "shop.yaml", request, "--why", "a test till").exit_code == 0
    said = cli("splice", "merge", "shop.yaml", request, "--yes")
    assert (said.exit_code, "is rejected (a test till)" in said.err.replace("\n", " ")) == (2, True)
    assert _ask(cli, "late", "shop.yaml") != request
    states = {r["id"]: r["state"] for r in cli("splice", "list", "shop.yaml", "--json").data}
    assert sorted(states.values()) == ["created", "rejected"]
    assert shop.results() == before


def test_only_what_was_asked_for(cli: Cli, shop: Shop) -> None:
    """A request can be narrowed to a time range and an output."""
    request = _ask(
        cli, "late", "shop.yaml", "--until", "2026-05-01T11:00:00Z", "--output", "hourly"
    )
    cli("splice", "merge", "shop.yaml", request, "--yes")
    assert (shop.results()[("10", "tea")], ("11", "cup") in shop.results()) == ((3, 9, 4), False)
    assert len(shop.table("events")) == 5
    assert shop.exact() == []


def test_few_late_rows_are_no_request(cli: Cli, shop: Shop) -> None:
    """With fewer rows than the threshold no request is made, and the exit code is 0."""
    said = cli("splice", "late", "shop.yaml", "--at-least", "3", "--json")
    assert (said.exit_code, said.data) == (0, {"request": None, "rows": 2, "at_least": 3})


def test_dead_letters_are_corrected(cli: Cli, shop: Shop) -> None:
    """A dead row that is mended is merged under its own identity.

    Unmended it is refused with the reason.
    """
    said = cli("splice", "dead-letters", "shop.yaml")
    assert (said.exit_code, "no event time" in said.err) == (2, True)
    request = _ask(cli, "dead-letters", "shop.yaml", "--set", "at=2026-05-01T11:30:00Z")
    cli("splice", "merge", "shop.yaml", request, "--yes")
    assert shop.results()[("11", "pot")] == (1, 70, 70)
    assert shop.exact() == []
    found = cli("row", "shop.yaml", "item=pot", "--json").data
    assert [(p["output"], p["state"]) for p in found[0]["places"]] == [
        ("dead_letters", "dead letter"), ("request", "merged"), ("events", "inserted"), ("hourly", "merged"),
    ]  # fmt: skip
    assert (
        cli("splice", "dead-letters", "shop.yaml", "--set", "at=2026-05-01T11:30:00Z").exit_code
        == 2
    )


def test_single_dead_letters_are_corrected(cli: Cli, shop: Shop) -> None:
    """A file of mended rows names each by its identity."""
    dead = shop.table("dead_letters")[0]
    line = {
        "_source": "web",
        "_partition": dead["_partition"],
        "_seq": dead["_seq"],
        "at": "2026-05-01T10:01:00Z",
        "price": "71",
    }
    Path("mended.jsonl").write_text(json.dumps(line))
    request = _ask(cli, "dead-letters", "shop.yaml", "--mend", "mended.jsonl")
    cli("splice", "merge", "shop.yaml", request, "--yes")
    assert shop.results()[("10", "pot")] == (1, 71, 71)
    assert shop.table("events")[0]["item"] == "pot"


def test_rows_of_a_file(cli: Cli, shop: Shop) -> None:
    """Rows that never came are merged from a file, and the same file only once.

    A later merge of late rows still proves exact.
    """
    Path("lost.csv").write_text(
        "at,item,price\n2026-05-01T10:50:00Z,tea,40\n2026-05-01T09:00:00Z,cup,2\n"
    )
    request = _ask(cli, "file", "shop.yaml", "lost.csv")
    cli("splice", "merge", "shop.yaml", request, "--yes")
    assert shop.results()[("10", "tea")] == (3, 47, 40)
    assert cli("splice", "file", "shop.yaml", "lost.csv").exit_code == 2
    cli("splice", "merge", "shop.yaml", _ask(cli, "late", "shop.yaml"), "--yes")
    assert shop.results()[("10", "tea")] == (4, 49, 40)
    assert shop.exact() == []


def test_too_early(cli: Cli, shop: Shop) -> None:
    """A row of a window that a driver may still compute is refused: it would be counted by two."""
    Path("new.csv").write_text("at,item,price\n2026-05-01T23:10:00Z,tea,40\n")
    request = _ask(cli, "file", "shop.yaml", "new.csv")
    said = cli("splice", "merge", "shop.yaml", request, "--yes")
    assert (said.exit_code, "still open to a driver" in said.err) == (2, True)


def test_where_is_my_row(cli: Cli, shop: Shop) -> None:
    """A row is followed by any field.

    Released and counted; late for what, by how much; asked for; merged, in which revision.
    """
    found = cli("row", "shop.yaml", "price=3", "--json").data
    assert [(p["output"], p["state"]) for p in found[0]["places"]] == [
        ("events", "released"),
        ("hourly", "counted"),
    ]
    late = cli("row", "shop.yaml", "at=2026-05-01T10:20:00Z")
    assert "late_order" in late.out
    assert "hourly         missing" in late.out
    request = _ask(cli, "late", "shop.yaml")
    cli("splice", "merge", "shop.yaml", request, "--yes")
    places = cli("row", "shop.yaml", "price=2", "--json").data[0]["places"]
    assert [(p["output"], p["state"]) for p in places] == [
        ("late", "late, merged since"), ("late", "late, merged since"), ("request", "merged"), ("events", "inserted"),
        ("hourly", "merged"),
    ]  # fmt: skip
    assert (places[3]["detail"]["position"], places[4]["detail"]["revision"]) == (1, 1)
    assert cli("row", "shop.yaml", "price=12345").exit_code == 1
    assert cli("row", "shop.yaml", "colour=red").exit_code == 2


def test_where_is_my_edge(cli: Cli, store: LocalStore, tmp_path: Path) -> None:
    """What begins or ends something is in no window by its own time, and is not said to be."""
    path = tmp_path / "shop.yaml"
    edges = "at, lag: 0s, edges: {kind: item, start: open, end: shut, keys: [price]},"
    path.write_text(
        SPEC.replace("at, lag: 0s,", edges).replace("size: 1h", "size: 1h, late_unit: event")
    )
    shop = Shop(store, load_spec(path), tmp_path / "work")
    shop.put(
        0, [("10:05", "open", 3), ("12:30", "shut", 3), ("12:40", "tea", 3), ("14:00", "tea", 5)]
    )
    shop.run()
    assert shop.exact() == []
    assert sorted(shop.results().items()) == [
        ((hour, "open"), (1, 3, 3)) for hour in ("10", "11", "12")
    ] + [(("12", "tea"), (1, 3, 3))]
    found = cli("row", "shop.yaml", "price=3", "--json").data
    windows = [place for row in found for place in row["places"] if place["output"] == "hourly"]
    assert [place["state"] for place in windows] == ["edge", "edge", "counted"]
    assert "ends what is open" in windows[1]["detail"]["why"]


def test_merging_twice_is_once(cli: Cli, shop: Shop) -> None:
    """The second call says where it was merged; show says so as well."""
    request = _ask(cli, "late", "shop.yaml")
    first: Said = cli("splice", "merge", "shop.yaml", request, "--yes", "--json")
    again = cli("splice", "merge", "shop.yaml", request, "--json")
    assert (again.data["again"], again.data["checkpoint"]) == (True, first.data["checkpoint"])
    assert (
        f"was merged in {first.data['checkpoint']}"
        in cli("splice", "show", "shop.yaml", request).out
    )


def test_a_part_is_decided_on_its_own(cli: Cli, shop: Shop) -> None:
    """One request becomes two.

    The part is merged, the rest rejected; the old one is closed and says into what it went.
    """
    request = _ask(cli, "late", "shop.yaml")
    assert cli("splice", "part", "shop.yaml", request, "--source", "web").exit_code == 2, (
        "that would be all of it"
    )
    said = cli(
        "splice", "part", "shop.yaml", request, "--until", "2026-05-01T11:00:00Z", "--json"
    ).data
    assert (said["request"], said["rows"], said["rest"], said["rest_rows"]) == (
        f"{request}-part",
        1,
        f"{request}-rest",
        1,
    )
    again = cli("splice", "part", "shop.yaml", request, "--until", "2026-05-01T11:00:00Z", "--json")
    assert again.data == said, "who was cut off may say the same again"
    assert (
        cli("splice", "part", "shop.yaml", request, "--until", "2026-05-01T10:00:00Z").exit_code
        == 2
    ), "but nothing else"
    assert cli("splice", "merge", "shop.yaml", request, "--yes").exit_code == 2
    assert cli("splice", "merge", "shop.yaml", said["request"], "--yes").exit_code == 0
    assert (shop.results()[("10", "tea")], ("11", "cup") in shop.results()) == ((3, 9, 4), False)
    assert cli("splice", "reject", "shop.yaml", said["rest"], "--why", "a test").exit_code == 0
    states = {
        r["id"]: (r["state"], r["decided_why"])
        for r in cli("splice", "list", "shop.yaml", "--json").data
    }
    assert states[request] == ("rejected", f"split into {request}-part and {request}-rest")
    assert (states[said["request"]][0], states[said["rest"]][0]) == ("merged", "rejected")
    assert shop.exact() == []


def test_a_part_by_output(cli: Cli, shop: Shop) -> None:
    """The same rows, into a window only: what they miss elsewhere is left in the rest."""
    request = _ask(cli, "late", "shop.yaml")
    said = cli("splice", "part", "shop.yaml", request, "--output", "hourly", "--json").data
    cli("splice", "merge", "shop.yaml", said["request"], "--yes")
    assert (shop.results()[("10", "tea")], len(shop.table("events"))) == ((3, 9, 4), 5)
    cli("splice", "merge", "shop.yaml", said["rest"], "--yes")
    assert len(shop.table("events")) == 7
    assert shop.exact() == []


def test_a_pipeline_without_events_says_why_not(
    cli: Cli, store: LocalStore, tmp_path: Path
) -> None:
    """The rows of its windows are nowhere, so nothing can be recomputed.

    Refused, with the reason and what to do instead.
    """
    text = (
        SPEC.replace("name: shop", "name: bare")
        + "outputs: {events: false}\nrelease: {mode: pass_through}\n"
    )
    (tmp_path / "bare.yaml").write_text(text)
    bare = Shop(store, load_spec(tmp_path / "bare.yaml"), tmp_path / "bare")
    for number, rows in enumerate(OBJECTS):
        bare.put(number, rows)
    bare.run()
    said = cli("splice", "show", "bare.yaml", _ask(cli, "late", "bare.yaml"))
    assert (said.exit_code, "keeps no events table" in said.err.replace("\n", " ")) == (2, True)
