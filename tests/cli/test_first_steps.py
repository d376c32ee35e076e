"""`tidegate init` and `put`: from a stranger's files to a spec that runs, without reading code."""

from __future__ import annotations

import gzip
import json
from contextlib import closing
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from tests.cli.conftest import Cli

from tidegate.checkpoints.local_store import LocalStore
from tidegate.checkpoints.open_store import open_store
from tidegate.checkpoints.pipeline_identity import ensure_identity
from tidegate.jobs.sinks import published_tables
from tidegate.jobs.sources.input_view import InputView
from tidegate.jobs.spec.loader import load_spec

FIRST = 1_517_743_500_000  # 2018-02-04T11:25:00Z in ms


@pytest.fixture
def shops(tmp_path: Path) -> Path:
    """Two folders: CSV with semicolons and a zoneless column, and JSON lines; both in epoch ms."""
    web, store = tmp_path / "shops/web", tmp_path / "shops/store"
    web.mkdir(parents=True)
    store.mkdir()
    rows = [(FIRST + 60_000 * n - 90_000 * (n % 2), "ab"[n % 2], n) for n in range(40)]
    lines = [f"{at};{item};{n}.5;{at + 9};{n};2018-02-04 12:00" for at, item, n in rows]
    head = "event_ms;Shop Name;amount;arrival_ms;_id;local"
    (web / "0001.csv").write_text("\n".join([head, *lines[:20], ""]))
    (web / "0002.csv").write_text("\n".join([head, *lines[20:], ""]))
    (web / "readme.txt").write_text("not a format")
    row = {"event_ms": FIRST, "Shop Name": "c", "amount": 1, "_id": 7, 'odd"name': 1}
    (store / "a.jsonl").write_text(json.dumps(row) + "\n")
    return tmp_path / "shops"


def test_init_writes_a_spec_that_reads_the_files_as_they_are(cli: Cli, shops: Path) -> None:
    """Format, delimiter, units, odd names and the lag that the rows need are found."""
    said = cli("init", "shops")
    assert (said.exit_code, said.out.splitlines()[-1]) == (
        0,
        "  tidegate run shops --until-end",
    )
    spec = load_spec("shops.yaml")
    web, store = spec.sources["web"], spec.sources["store"]
    assert (web.format, store.format, web.parse.delimiter) == ("csv", "json", ";")
    assert (web.event_time, web.parse.timestamps, store.parse.timestamps) == (
        "event_ms",
        "ms",
        "ms",
    )
    assert spec.columns == {
        "event_ms": "timestamp",
        "Shop Name": "string",
        "amount": "double",
        "id": "long",
        "arrival_ms": "long",
        "local": "string",
    }
    assert web.evolution.renamed == {"_id": "id"}
    assert (web.lag, store.lag) == (30_000_000, 1_000_000)
    assert web.path == f"file://{shops}/web/"
    (window,) = spec.windows.values()
    assert (window.keys, str(window.aggregates["sum_amount"])) == (("Shop Name",), "sum(`amount`)")
    assert cli("validate", "shops").out.count("warning") == 0
    # Not at the top: `make faults` runs other tests of this module on code without cases.
    from tidegate.jobs.cases.case_file import read_case

    case = read_case(Path("cases/shops/first.yaml"), spec)
    assert [str(given.file) for given in case.steps[0].rows.values()] == [
        "cases/shops/store.jsonl",
        "cases/shops/web.csv",
    ]
    assert len(Path("cases/shops/web.csv").read_text().splitlines()) == 21
    assert "  tidegate test shops --record  # then read cases/shops/first.yaml" in said.out


def test_init_overwrites_nothing_and_needs_a_time(cli: Cli, shops: Path, tmp_path: Path) -> None:
    """A spec that was edited stays; files without a readable time are refused with their columns."""
    cli("init", "shops")
    before = Path("shops.yaml").read_text()
    assert cli("init", "shops").exit_code == 2
    assert Path("shops.yaml").read_text() == before
    (tmp_path / "plain.csv").write_text("id,day\n1,03/01/2026\n")
    refused = cli("init", "plain.csv", "--name", "plain")
    assert (refused.exit_code, "id (long), day (string)" in refused.err) == (2, True)
    assert not Path("plain.yaml").exists()
    missing = cli("init", "nowhere.csv")
    assert (missing.exit_code, "verify" in missing.err) == (2, False)


def test_init_takes_the_zone_and_the_column_that_it_is_told(cli: Cli, tmp_path: Path) -> None:
    """Times without a zone get `timezone`; --event-time outweighs what the names suggest."""
    text = "seen,received\n2026-03-01 10:00:00,2026-03-01T11:00:00Z\n"
    (tmp_path / "a.csv").write_text(text)
    cli("init", "a.csv", "--name", "one")
    cli("init", "a.csv", "--name", "two", "--event-time", "received")
    one, two = (load_spec(f"{name}.yaml").sources.popitem()[1] for name in ("one", "two"))
    assert (one.event_time, one.timezone) == ("seen", "UTC")
    assert two.event_time == "received"


def test_init_takes_folders_with_different_clocks(cli: Cli, tmp_path: Path) -> None:
    """One column is the event time of a folder, and no time or one of another form in the next."""
    folders = {
        "iso": '{"at": "2018-02-04T11:25:00Z", "id": 1}\n{"at": "2018-02-04T11:45:00Z", "id": 2}\n',
        "epoch": f'{{"at": {FIRST}, "id": 3}}\n',
        "note": f'{{"at": "noon", "seen": {FIRST}, "id": 4}}\n',
        "size": '{"at": 7, "seen": "2018-02-04T11:25:00Z", "id": 5}\n',
    }
    for name, text in folders.items():
        (tmp_path / "mixed" / name).mkdir(parents=True)
        (tmp_path / "mixed" / name / "a.jsonl").write_text(text)
    said = cli("init", "mixed")
    assert said.exit_code == 0, said.err
    spec = load_spec("mixed.yaml")
    times = {"at": "timestamp", "seen": "timestamp"}
    assert spec.columns == {"id": "long", "at_text": "string", "at_long": "long", **times}
    clocks = {name: (one.event_time, one.parse.timestamps) for name, one in spec.sources.items()}
    assert clocks == {
        "iso": ("at", "iso"),
        "epoch": ("at", "ms"),
        "note": ("seen", "ms"),
        "size": ("seen", "iso"),
    }
    assert spec.sources["note"].evolution.renamed == {"at": "at_text"}
    assert spec.sources["size"].evolution.renamed == {"at": "at_long"}
    assert spec.sources["iso"].evolution.renamed == {}


def test_init_takes_a_file_without_rows(cli: Cli, tmp_path: Path) -> None:
    """Its columns have types; the sizes of lag and window are the smallest ones."""
    table = pa.table(
        {"at": pa.array([], pa.timestamp("us", "UTC")), "k": pa.array([], pa.string())}
    )
    (tmp_path / "none").mkdir()
    pq.write_table(table, tmp_path / "none" / "a.parquet")
    said = cli("init", "none")
    assert said.exit_code == 0, said.err
    spec = load_spec("none.yaml")
    assert (spec.columns, list(spec.windows)) == (
        {"at": "timestamp", "k": "string"},
        ["per_second"],
    )


def test_a_few_broken_rows_do_not_stop_init(cli: Cli, tmp_path: Path) -> None:
    """A cut-off JSON line, times that are none, and a text among numbers; `run` makes dead letters of such rows.

    With as many bad as good ones the column holds no times.
    """
    good = "".join(f'{{"at": {FIRST + 1000 * n}, "id": {n}}}\n' for n in range(20))
    (tmp_path / "a.jsonl").write_text(good + '{"at": 17\n')
    (tmp_path / "b.csv").write_text(
        "at,id\n" + "".join(f"{FIRST + 1000 * n},{n}\n" for n in range(20)) + "never,20\n"
    )
    (tmp_path / "c.csv").write_text(f"at,id\n{FIRST},1\nnever,2\n")
    for name, more in (("a.jsonl", []), ("b.csv", []), ("b.csv", ["--event-time", "at"])):
        assert cli("init", name, "--name", f"p{len(more)}{name[0]}", *more).exit_code == 0
    for spec in ("p0a", "p0b", "p2b"):
        source = load_spec(f"{spec}.yaml").sources.popitem()[1]
        assert (source.event_time, source.parse.timestamps) == ("at", "ms")
    (tmp_path / "d.csv").write_text(
        "at,amount\n"
        + "".join(f"2026-03-02 {n:02}:00:00,{n}.5\n" for n in range(20))
        + "2026-03-02 25:61:00,1.5\n2026-03-02 20:00:00,twelve\n"
    )
    assert cli("init", "d.csv", "--name", "d").exit_code == 0
    made = load_spec("d.yaml")
    assert made.columns["amount"] == "string"
    assert made.sources.popitem()[1].event_time == "at"
    remark = "# amount: 1 of 22 values are not of type double; declare it so, and their rows"
    assert remark in Path("d.yaml").read_text()
    assert remark in cli("infer", "d.csv").out
    refused = cli("init", "c.csv", "--name", "c")
    assert (refused.exit_code, "at (string), id (long)" in refused.err) == (2, True)


def test_init_reads_typed_formats(cli: Cli, tmp_path: Path) -> None:
    """Parquet's own times are candidates; its numbers are not, because they have no unit."""
    at = pa.array([FIRST * 1000, None], pa.timestamp("us"))
    table = pa.table({"ms": pa.array([FIRST, FIRST]), "at": at})
    pq.write_table(table, tmp_path / "a.parquet")
    cli("init", "a.parquet", "--name", "typed")
    (source,) = load_spec("typed.yaml").sources.values()
    assert (source.event_time, source.timezone, source.columns["ms"]) == ("at", "UTC", "long")


def test_texts_of_a_typed_format_are_no_event_time(cli: Cli, tmp_path: Path) -> None:
    """A driver casts no text of Parquet to a time, so each row would be a dead letter."""
    texts = pa.table({"at": ["2018-02-04T11:25:00Z", "2018-02-04T11:26:00Z"]})
    pq.write_table(texts, tmp_path / "a.parquet")
    for more in ([], ["--event-time", "at"]):
        refused = cli("init", "a.parquet", "--name", "typed", *more)
        assert (refused.exit_code, "at (string)" in refused.err) == (2, True)


@pytest.mark.parametrize(
    ("name", "data"),
    [
        ("a.csv.gz", gzip.compress(b"at\n1\n")[:10] + b"damaged in the middle"),
        ("a.csv.xz", b"no xz at all"),
        ("a.csv", b"at," + b"x" * 200_000 + b"\n"),
        ("a.json.gz", gzip.compress(b"{}")[:-4]),
    ],
    ids=["gzip", "xz", "csv", "cut"],
)
def test_damaged_files_are_named(cli: Cli, tmp_path: Path, name: str, data: bytes) -> None:
    """`init` and `infer` say which file cannot be read, and do not report a defect."""
    (tmp_path / name).write_bytes(data)
    for said in (cli("init", name, "--name", "p"), cli("infer", name)):
        assert said.exit_code == 2
        assert f"{name} cannot be read" in said.err.replace("\n", " ")


def test_folders_of_input_are_only_read(cli: Cli, shops: Path) -> None:
    """They may be read-only, or lie on a network file system; nothing is left behind in them."""
    before = sorted(shops.rglob("*"))
    assert cli("init", "shops").exit_code == 0
    assert cli("infer", "shops/web/0001.csv").exit_code == 0
    spec = load_spec("shops.yaml")
    gone = spec.sources["web"].model_copy(update={"path": f"{shops}/gone/"})
    sources = {**spec.sources, "web": gone}
    spec = spec.model_copy(update={"sources": sources})
    with closing(InputView(open_store(".tidegate/store"), spec, shops.parent)) as view:
        assert [one.key for one in view.list_objects("@store/")] == ["@store/a.jsonl"]
        assert view.get("@store/a.jsonl").data
        assert list(view.list_objects("@web/")) == []
    assert sorted(shops.rglob("*")) == before


def test_put_copies_files_to_the_sources_once(cli: Cli, shops: Path, tmp_path: Path) -> None:
    """A file goes to the source that has its folder's name; the same name is not replaced."""
    cli("init", "shops", "--inbox")
    said = cli("put", "shops", "shops", "--end", "--json")
    inbox = "inbox/shops/web"
    assert said.data["web"] == [f"{inbox}/0001.csv", f"{inbox}/0002.csv"]
    store = tmp_path / ".tidegate/store"
    assert (store / inbox / "0001.csv").read_text() == (shops / "web/0001.csv").read_text()
    assert (store / inbox / "_DONE").exists()
    assert cli("put", "shops", "shops", "--json").data == {"web": [], "store": []}
    assert "copied 0 files to web; 2 were there already" in cli("put", "shops", "shops").out
    (shops / "web/0001.csv").write_text("other")
    assert "exists already" in cli("put", "shops", "shops/web/0001.csv").err
    changed = (shops / "web/0002.csv").read_text().replace("a", "b")
    (shops / "web/0002.csv").write_text(changed)
    refused = cli("put", "shops", "shops/web/0002.csv")
    assert (refused.exit_code, "exists already" in refused.err) == (2, True)
    (tmp_path / "new.csv").write_text("x")
    refused = cli("put", "shops", "new.csv")
    assert (refused.exit_code, "--source: store, web" in refused.err) == (2, True)
    assert cli("put", "shops", "new.csv", "--source", "web").exit_code == 0


def test_put_replaces_what_was_corrected(cli: Cli, shops: Path, tmp_path: Path) -> None:
    """On request only, and with a word about drivers that have read the object."""
    cli("init", "shops", "--inbox")
    cli("put", "shops", "shops")
    corrected = (shops / "web/0001.csv").read_text().replace("a", "b")
    (shops / "web/0001.csv").write_text(corrected)
    said = cli("put", "shops", "shops/web", "--replace").out
    assert "copied 1 files to web; 1 were there already" in said
    assert "replaced 1 of them: if a driver has read one, restore a checkpoint from before" in said
    copy = tmp_path / ".tidegate/store/inbox/shops/web/0001.csv"
    assert copy.read_text() == corrected
    assert "replaced" not in cli("put", "shops", "shops/web", "--replace").out


def test_put_warns_of_files_that_no_driver_reads(cli: Cli, shops: Path, tmp_path: Path) -> None:
    """In the order of keys, a name below one that was read comes too late."""
    cli("init", "shops", "--inbox")
    spec = tmp_path / "shops.yaml"
    spec.write_text(spec.read_text().replace("order: arrival", "order: keys"))
    assert "warning" not in cli("put", "shops", "shops").out
    (shops / "web/0000.csv").write_text("x")
    said = cli("put", "shops", "shops/web/0000.csv")
    assert (said.exit_code, "copied 1 files to web" in said.out) == (0, True)
    inbox = "inbox/shops/web"
    assert f"warning: {inbox}/0000.csv sorts before {inbox}/0002.csv" in said.out


def test_put_copies_into_a_folder_that_is_named_by_its_full_path(
    cli: Cli, shops: Path, tmp_path: Path
) -> None:
    """Files of a source outside the store go where the source reads, not into the store."""
    cli("init", "shops", "--inbox")
    spec = tmp_path / "shops.yaml"
    home = tmp_path / "elsewhere"
    home.mkdir()
    spec.write_text(spec.read_text().replace("inbox/shops/web/", f"{home}/"))
    assert cli("put", "shops", "shops/web", "--json").data == {"web": ["0001.csv", "0002.csv"]}
    assert (home / "0001.csv").read_text() == (shops / "web/0001.csv").read_text()


@pytest.mark.slow
@pytest.mark.e2e
@pytest.mark.filterwarnings("ignore")  # Spark's own sockets
def test_files_become_tables_in_three_commands(cli: Cli, shops: Path) -> None:
    """init, put and run --until-end leave every row in the tables."""
    cli("init", "shops", "--inbox")
    cli("put", "shops", "shops")
    ran = cli("run", "shops", "--until-end")
    assert (ran.exit_code, "41 read = 41 released" in ran.out) == (0, True)
    rows = cli("tables", "shops", "per_minute", "--json").data["rows"]
    assert sum(row["rows"] for row in rows) == 41
    assert {row["Shop Name"] for row in rows} == {"a", "b", "c"}


def test_dead_letters_are_read_again_once(
    cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Repaired objects and broken lines become new objects behind the newest; a second call adds none."""
    inbox = tmp_path / ".tidegate/store/inbox"
    inbox.mkdir(parents=True)
    (inbox / "1.csv").write_text("at,v\n2026-01-01T00:00:00Z,1\nbroken\n,2\n")
    (inbox / "2.csv.gz").write_bytes(gzip.compress(b"at,v\n2026-01-01T00:00:00Z,3\n"))
    (inbox / "3.csv").write_text("at,v\n")
    (tmp_path / "p.yaml").write_text(
        "name: p\nsources: {a: {path: inbox/, format: csv, schema: {at: timestamp, v: long},"
        " event_time: at, lag: 1s}}\n"
    )
    store = LocalStore(tmp_path / ".tidegate/store")
    ensure_identity(store, "p")
    dead = [
        {"_source": "a", "object": f"inbox/{name}", "_seq": seq, "row": row and json.dumps(row)}
        for name, seq, row in (
            ("1.csv", 1, {"_text": "broken"}),
            ("1.csv", 2, {"_text": ",2"}),
            ("1.csv", 3, {"v": 4}),
            ("2.csv.gz", 4, None),
            ("gone.csv", 5, None),
        )
    ]
    monkeypatch.setattr(
        published_tables, "read_table", lambda *_a, **_k: pa.Table.from_pylist(dead)
    )
    planned = cli("reread", "p.yaml", "--dry-run", "--json").data
    assert not list(inbox.glob("*reread*"))
    done = cli("reread", "p.yaml", "--json").data
    assert [one[-13:] for one in done["copied"]] == [one[-13:] for one in planned["copied"]]
    assert sorted(done["copied"]) == done["copied"]
    lines, whole = done["copied"]
    assert done["gone"] == ["inbox/gone.csv"]
    assert (store.get(lines).data, lines[:12]) == (b"at,v\nbroken\n,2\n", "inbox/3.csv~")
    assert store.get(whole).data == store.get("inbox/2.csv.gz").data
    assert (whole.endswith("-2.csv.gz"), lines.endswith("-1.csv")) == (True, True)
    again = cli("reread", "p.yaml", "--json").data
    assert (again["copied"], len(again["copied_before"])) == ([], 2)
