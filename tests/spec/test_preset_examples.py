"""docs/presets.md: its tables equal the presets in code, and its examples validate and run."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import pytest
from tests.conformance.presets_on_spark import (
    NAMES,
    audit_input,
    compare_with_oracle,
    run_case,
    run_example,
    run_with_silences,
)
from tests.conformance.spark_cases import CASES, EXAMPLES
from tests.conformance.stepped_run import START
from tests.e2e.drivers import Piped
from tests.scheduling import sample_in_ci

from tidegate.jobs.sinks.published_tables import read_table
from tidegate.jobs.spec.loader import load_spec, parse_spec
from tidegate.jobs.spec.pipeline import PRESETS

# CI has a driver for one of them, and an injected clock for all.
RUN_BY_DRIVERS: Final = sample_in_ci(["flink", *(name for name in NAMES if name != "flink")], 1)
DOCS: Final = Path(__file__).parents[2] / "docs"
SECTIONS: Final = {  # the first column of a table -> the section of the preset
    "every source": "source",
    "sources without a declared frontier": "source",
    "sources with a declared frontier": "declared",
    "sources that say nothing about their frontier": "undeclared",
    "sources with punctuation": "punctuated",
    "output": "coalesce",
    "release": "release",
    "release with a declared frontier": "declared_release",
    "barriers": "barriers",
    "every window": "window",
    "session windows": "session",
}
UNDER: Final = {"punctuated": "punctuation."}  # the section holds the fields of this one
ROWS: Final = {  # preset -> table -> rows, as docs/presets.md names them
    "nscldaq": {"events": 45, "late": 1, "built": 22, "barriers": 2},
    "streaminsight": {"events": 21, "late": 0, "trades": 8},
    "hazelcast": {"events": 48, "late": 4, "recent": 22, "movement": 2},
    "flink": {"events": 29, "late": 2, "visits": 9},
    "pipet": {"events": 29, "late": 1, "large": 14, "totals": 29, "rejections": 0},
    "wire": {"events": 37, "late": 1, "per_10_s": 12, "busy": 2, "barriers": 2},
}


def read_documented_options(preset: str) -> dict[tuple[str, str], str]:
    """(section, option) -> value, from the preset's table in docs/presets.md."""
    page = (DOCS / "presets.md").read_text()
    chapter = re.split(r"^## ", page, flags=re.MULTILINE)
    (text,) = [part for part in chapter if part.startswith(f"{preset}\n")]
    options = {}
    for applies_to, option, value in re.findall(
        r"^\| ([a-z ]+) \| `([\w.]+)` \| `([^`]*)` \|$", text, re.MULTILINE
    ):
        options[SECTIONS[applies_to], option] = value
    return options


def flatten_options(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    """Dotted option names with their values as YAML writes them."""
    for name, value in values.items():
        if isinstance(value, Mapping):
            yield from flatten_options(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", str(value).lower() if isinstance(value, bool) else str(value)


@pytest.mark.parametrize("preset", NAMES)
def test_the_table_of_options_is_the_preset(preset: str) -> None:
    """Every option of the code is in the table with its value, and no other."""
    in_code = {
        (section, name): value
        for section, options in PRESETS[preset].items()
        for name, value in flatten_options(options, UNDER.get(section, ""))
    }
    assert read_documented_options(preset) == in_code


def test_the_default_preset_sets_nothing() -> None:
    """As docs/presets.md promises."""
    assert PRESETS["tidegate"] == {}


@pytest.mark.parametrize("preset", NAMES)
def test_every_preset_has_an_example_that_validates(preset: str) -> None:
    """The example loads, names its preset and no other, and is linked from the page."""
    spec = load_spec(EXAMPLES / f"{preset}.yaml")
    assert (spec.preset, spec.name) == (preset, f"preset_{preset}")
    assert f"](examples/presets/{preset}.yaml)" in (DOCS / "presets.md").read_text()


@pytest.mark.parametrize("preset", NAMES)
def test_every_example_has_small_input(preset: str) -> None:
    """A folder of JSON lines per source that ends with `_DONE`, where the spec reads it."""
    for name, source in load_spec(EXAMPLES / f"{preset}.yaml").sources.items():
        assert source.path == f"inbox/{preset}/{name}/"
        objects = sorted((EXAMPLES / "input" / preset / name).iterdir())
        assert objects.pop().name == "_DONE"
        assert objects
        assert all(found.suffix == ".jsonl" for found in objects)
        assert max(found.stat().st_size for found in objects) <= 5_000


@pytest.fixture(scope="module")
def ended_run(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Piped:
    """The example of a preset, run by a real driver until it has read its input."""
    preset: str = request.param
    return run_example(preset, tmp_path_factory.mktemp(preset) / "pipeline")


@pytest.mark.e2e
@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("ended_run", RUN_BY_DRIVERS, indirect=True)
def test_an_example_runs_to_its_end(ended_run: Piped) -> None:
    """The driver ends by itself, and the tables have the rows that the page names."""
    expected = ROWS[ended_run.spec.preset]
    assert {name: ended_run.table(name).num_rows for name in expected} == expected


@pytest.mark.e2e
@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("ended_run", RUN_BY_DRIVERS, indirect=True)
def test_an_example_is_exact(ended_run: Piped, tmp_path: Path) -> None:
    """The independent check, which reads the JSON lines again, finds every row in one place."""
    assert audit_input(ended_run, tmp_path / "audit") == []


@pytest.mark.e2e
@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("ended_run", RUN_BY_DRIVERS, indirect=True)
def test_an_example_equals_the_oracle(ended_run: Piped, tmp_path: Path) -> None:
    """Every epoch has the decision, the rows and the counters of the oracle."""
    assert compare_with_oracle(ended_run, ended_run.spec, tmp_path / "oracle") == []


@pytest.mark.e2e
@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("ended_run", ["flink"], indirect=True)
def test_an_oracle_of_another_pipeline_differs(ended_run: Piped, tmp_path: Path) -> None:
    """The comparison finds another lag in the decisions, and the rows it makes late in the rows."""
    text = ended_run.spec_file.read_text()
    other = parse_spec(re.sub(r"lag: \w+", "lag: 0s", text))
    assert other.digest() != ended_run.spec.digest()
    found = " ".join(compare_with_oracle(ended_run, other, tmp_path / "oracle"))
    assert "decided" in found


@pytest.fixture(scope="module")
def session() -> Iterator[Any]:
    """One Spark session for the runs with an injected clock."""
    from tidegate.jobs.spark.spark_session import open_session

    started = open_session(load_spec(EXAMPLES / "flink.yaml"))
    yield started
    started.stop()


# PySpark closes its sockets to tasks in its own time.
_SPARK_SOCKETS = pytest.mark.filterwarnings(
    "ignore:unclosed <socket:ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning"
)


@_SPARK_SOCKETS
@pytest.mark.e2e
@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", sample_in_ci([*NAMES, *CASES], len(NAMES)))
def test_a_run_with_silences_equals_the_oracle(session: Any, tmp_path: Path, name: str) -> None:
    """Sources stall, fall silent, resume and end; a further case has what no example has."""
    play = run_with_silences if name in NAMES else run_case
    run = play(name, tmp_path / "pipeline", session)
    assert compare_with_oracle(run, run.spec, tmp_path / "oracle") == []
    assert audit_input(run, tmp_path / "audit") == []
    idle = [
        entry
        for filled in run.log().epochs_between(0, 1, run.log().head().slot)
        for entry in filled.epoch.decision["recorded"]
        if entry["kind"] in ("idle", "residence_expired", "cti")
    ]
    # The others of the presets have no timer: their sources wait forever.
    assert bool(idle) == (name in ("hazelcast", "nscldaq", "pipet", "streaminsight", "wire"))


@_SPARK_SOCKETS
@pytest.mark.e2e
@pytest.mark.slow
@pytest.mark.timeout(600)
def test_six_minutes_of_streaminsight(session: Any, tmp_path: Path) -> None:
    """Windows of three minutes are reported at the CTIs of every sixth; the last one is open until
    the end.
    """
    run = run_case("six_minutes", tmp_path / "pipeline", session)
    rows = read_table(run.spec, run.store(), "w").to_pylist()
    found = [
        (row["_epoch"], round(row["window_start"].timestamp() / 60) - START // 60_000_000, row["n"])
        for row in rows
    ]
    assert sorted(found) == [(2, 0, 2), (2, 3, 1), (3, 6, 1), (3, 9, 2), (4, 12, 1)]
