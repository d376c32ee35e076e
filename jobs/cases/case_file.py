"""Reads a test case of a pipeline from YAML (docs/pipeline-tests.md).

An error names file, line, what was found and what is allowed; all mistakes of a case are listed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from tidegate.checkpoints.row_counts import ROW_EQUATION, ROW_NOTES, RULE
from tidegate.errors import suggest_name
from tidegate.jobs.eventtime.decision_types import Member
from tidegate.jobs.sinks.output_tables import build_table_schema
from tidegate.jobs.spec.loader import Location, find_line, format_findings, to_plain_value
from tidegate.jobs.spec.yaml_text import PlacedConstructor, YamlTextError, read_yaml
from tidegate.time_units import parse_duration

from .case_rows import CaseRow, RowsInput, convert_instant, encode_rows, read_csv_rows
from .errors import CASE_INVALID, CASE_UNREADABLE, NO_CASES

if TYPE_CHECKING:
    from tidegate.jobs.spec.pipeline import PipelineSpec

COUNTS: Final = (*ROW_EQUATION, "retained", *ROW_NOTES, RULE)
"""Names of counters, or what they begin with before a colon."""
_DEFAULT_START = "2026-01-01T00:00:00Z"
_FIELDS = ("description", "start", "steps", "expect")
_ACTIONS = ("rows", "wait", "restart", "cti", "end")
_EXPECTED = ("tables", "counters", "error")


class _TimesAsTexts(PlacedConstructor):
    """Leaves times as they are written: the source or the table says what they are."""


_TimesAsTexts.add_constructor(
    "tag:yaml.org,2002:timestamp", lambda loader, node: loader.construct_scalar(node)
)


@dataclass(frozen=True)
class Step:
    """One thing that happens in a case; all fields but one are empty.

    Attributes:
        rows: partition -> what arrives, all in one epoch.
        wait: ticks without new rows.
        restart: whether the driver ends, and another one goes on.
        ctis: source -> punctuation that a person sends, ticks.
        ends: sources that have no more rows.
    """

    rows: Mapping[Member, RowsInput] = field(default_factory=dict)
    wait: int = 0
    restart: bool = False
    ctis: Mapping[str, int] = field(default_factory=dict)
    ends: tuple[str, ...] = ()


@dataclass(frozen=True)
class Expectation:
    """What a case expects.

    Attributes:
        tables: table -> rows, with the columns that count; other tables do not count.
        table_places: table -> file and line.
        counters: name, or source and name with a dot -> rows.
        counter_places: the same -> file and line.
        error: code of the error that ends the run.
    """

    tables: Mapping[str, Sequence[CaseRow]] = field(default_factory=dict)
    table_places: Mapping[str, str] = field(default_factory=dict)
    counters: Mapping[str, int] = field(default_factory=dict)
    counter_places: Mapping[str, str] = field(default_factory=dict)
    error: str | None = None


@dataclass(frozen=True)
class Case:
    """A test case.

    Attributes:
        path: its file.
        description: what it shows.
        start: wall clock at the beginning, ticks.
        steps: what happens, in this order.
        expected: None if it is not recorded yet.
    """

    path: Path
    description: str
    start: int
    steps: Sequence[Step]
    expected: Expectation | None


def find_cases(spec_path: Path, given: Sequence[Path]) -> list[Path]:
    """Return the files of cases: `given` files and folders, else the folder beside the spec.

    That folder is `cases/` and the name of the spec's file, for example `cases/orders/` for
    `orders.yaml`.

    Raises:
        ConfigurationError: there is none.
    """
    places = list(given) or [spec_path.parent / "cases" / spec_path.stem]
    found = [
        file
        for place in places
        for file in (sorted(place.glob("**/*.yaml")) if place.is_dir() else [place])
        if given or place.is_dir()
    ]
    if not found:
        raise NO_CASES(folder=places[0])
    return found


def read_case(path: Path, spec: PipelineSpec) -> Case:
    """Read one case of a pipeline.

    Raises:
        ConfigurationError: no such file, not YAML, or something in it is wrong. The message lists
            all mistakes with their lines.
    """
    return _CaseReader(path, spec, _load_yaml(path)).read()


def _load_yaml(path: Path) -> Any:
    try:
        return read_yaml(path.read_text("utf-8"), _TimesAsTexts)
    except OSError as error:
        raise CASE_UNREADABLE(path=path, reason=error.strerror or error) from error
    except UnicodeDecodeError as error:
        raise CASE_UNREADABLE(path=path, reason="it is not UTF-8") from error
    except YamlTextError as error:
        text = f"{path}:{error.line}: not valid YAML: {error.reason}"
        raise CASE_INVALID(findings=text) from error


class _CaseReader:
    """Reads the parts of a case, and keeps what is wrong in them.

    Args:
        raw: as ruamel's round-trip loader gives it.
    """

    def __init__(self, path: Path, spec: PipelineSpec, raw: Any) -> None:
        self._path, self._spec, self._raw = path, spec, raw
        self._values = to_plain_value(raw)
        self._mistakes: list[tuple[Location, str]] = []
        self._findings: list[str] = []  # of other files

    def read(self) -> Case:
        """Return the case."""
        top = self._take_mapping((), self._values, _FIELDS)
        steps = [self._read_step(("steps", i), one) for i, one in self._take_list(top, "steps")]
        expected = None
        if "expect" in top:
            expected = self._read_expectation(top["expect"])
        start = self._convert_time(("start",), top.get("start", _DEFAULT_START))
        if "steps" not in top:
            self._note((), "steps: required field is missing")
        self._refuse_mistakes()
        description = str(top.get("description", ""))
        return Case(self._path, description, start, steps, expected)

    def _refuse_mistakes(self) -> None:
        findings = format_findings(str(self._path), self._raw, self._mistakes) + self._findings
        if findings:
            raise CASE_INVALID(findings="\n".join(findings))

    def _note(self, place: Location, message: str) -> None:
        self._mistakes.append((place, message))

    def _locate(self, place: Location) -> str:
        """Return file and line of a place."""
        return f"{self._path}:{find_line(self._raw, place)}"

    def _take_mapping(self, place: Location, value: Any, allowed: Sequence[str]) -> dict[str, Any]:
        if not isinstance(value, dict):
            self._note(place, f"a mapping is needed, with {', '.join(allowed)}; found {value!r}")
            return {}
        for name in value:
            if name not in allowed:
                hint = suggest_name(name, allowed)
                text = f"unknown field{hint}; allowed here: {', '.join(allowed)}"
                self._note((*place, name), text)
        return {name: one for name, one in value.items() if name in allowed}

    def _take_list(self, values: Mapping[str, Any], name: str) -> list[tuple[int, Any]]:
        found = values.get(name, [])
        if not isinstance(found, list):
            self._note((name,), f"a list is needed; found {found!r}")
            return []
        return list(enumerate(found))

    # Steps

    def _read_step(self, place: Location, value: Any) -> Step:
        if value in ("restart", "end"):
            value = {value: True}
        found = self._take_mapping(place, value, _ACTIONS)
        if len(found) != 1:
            if isinstance(value, dict):
                self._note(place, f"a step has one of {', '.join(_ACTIONS)}")
            return Step()
        ((action, given),) = found.items()
        place = (*place, action)
        if action == "rows":
            return Step(rows=self._read_arrivals(place, given))
        if action == "wait":
            return Step(wait=self._convert_duration(place, given))
        if action == "cti":
            return Step(ctis=self._read_ctis(place, given))
        if action == "end":
            return Step(ends=self._read_ends(place, given))
        if given is not True:
            self._note(place, "write `- restart`")
        return Step(restart=True)

    def _convert_duration(self, place: Location, value: Any) -> int:
        try:
            ticks = parse_duration(value)
        except ValueError as error:
            self._note(place, str(error))
            return 0
        if ticks <= 0:
            self._note(place, f"must be above 0; got {value!r}")
        return ticks

    def _convert_time(self, place: Location, value: Any) -> int:
        try:
            return convert_instant(value)
        except ValueError as error:
            self._note(place, str(error))
            return 0

    def _read_ctis(self, place: Location, value: Any) -> dict[str, int]:
        found = self._take_mapping(place, value, list(self._spec.sources))
        return {name: self._convert_time((*place, name), time) for name, time in found.items()}

    def _read_ends(self, place: Location, value: Any) -> tuple[str, ...]:
        if value is True:
            return tuple(self._spec.sources)
        names = value if isinstance(value, list) else [value]
        for i, name in enumerate(names):
            if str(name) not in self._spec.sources:
                where = (*place, i) if isinstance(value, list) else place
                self._note(where, self._describe_unknown_source(str(name)))
        return tuple(str(name) for name in names)

    def _describe_unknown_source(self, name: str) -> str:
        known = self._spec.sources
        return f"no source {name!r}{suggest_name(name, known)}; there are {', '.join(known)}"

    def _read_arrivals(self, place: Location, value: Any) -> dict[Member, RowsInput]:
        if not isinstance(value, dict):
            self._note(place, f"a mapping is needed, of sources to rows; found {value!r}")
            return {}
        arrivals = {}
        for name, given in value.items():
            member = self._find_member((*place, name), name)
            if member is not None:
                arrivals[member] = self._read_input((*place, name), given, member.source)
        return arrivals

    def _find_member(self, place: Location, name: str) -> Member | None:
        source, slash, partition = name.partition("/")
        if source not in self._spec.sources:
            self._note(place, self._describe_unknown_source(source))
            return None
        spec = self._spec.sources[source]
        if spec.kafka is not None:
            return Member(source, partition or "0")
        if slash and spec.partition_by == "source":
            self._note(place, f"{source} is one partition: write {source}")
        if not slash and spec.partition_by == "folder":
            self._note(place, f"{source} has a partition per folder: write {source}/FOLDER")
        return Member(source, partition or "0")

    def _read_input(self, place: Location, value: Any, source: str) -> RowsInput:
        if isinstance(value, dict) and "object" in value:
            found = self._take_mapping(place, value, ("object",))
            return RowsInput(file=self._find_file((*place, "object"), found["object"]))
        spec = self._spec.sources[source]
        rows = self._read_rows(place, value, f"source {source}", list(spec.columns))
        if not self._mistakes and not self._findings:
            try:
                encode_rows(spec, rows)
            except ValueError as error:
                self._findings.append(str(error))
        return RowsInput(rows)

    def _find_file(self, place: Location, name: Any) -> Path | None:
        file = self._path.parent / str(name)
        with suppress(OSError):  # a name that no file can have
            if file.is_file():
                return file
        self._note(place, f"there is no file {file}")
        return None

    def _read_rows(
        self, place: Location, value: Any, owner: str, columns: Sequence[str]
    ) -> list[CaseRow]:
        """Read rows: a list of mappings, CSV, or the name of a file of CSV."""
        if isinstance(value, dict) and "file" in value:
            found = self._take_mapping(place, value, ("file",))
            file = self._find_file((*place, "file"), found["file"])
            rows = self._read_csv_file(file) if file else []
        elif isinstance(value, str):
            # The text begins in the line below its key.
            where, line = self._locate(place).rsplit(":", 1)
            rows = self._read_csv(value, where, int(line) + 1)
        elif isinstance(value, list):
            rows = [row for i, one in enumerate(value) for row in self._read_row((*place, i), one)]
        else:
            self._note(place, f"rows are a list of mappings, CSV, or file: NAME; found {value!r}")
            return []
        self._refuse_unknown_columns(rows, owner, columns)
        return rows

    def _read_csv_file(self, file: Path) -> list[CaseRow]:
        try:
            return self._read_csv(file.read_text("utf-8"), str(file), 1)
        except UnicodeDecodeError:
            self._findings.append(f"{file}:1: it is not UTF-8")
            return []

    def _read_csv(self, text: str, where: str, first_line: int) -> list[CaseRow]:
        try:
            return read_csv_rows(text, where, first_line)
        except ValueError as error:
            self._findings.append(str(error))
            return []

    def _read_row(self, place: Location, value: Any) -> list[CaseRow]:
        if not isinstance(value, dict):
            self._note(place, f"a row is a mapping of columns to values; found {value!r}")
            return []
        return [CaseRow(value, self._locate(place))]

    def _refuse_unknown_columns(
        self, rows: Sequence[CaseRow], owner: str, columns: Sequence[str]
    ) -> None:
        seen: set[str] = set()
        for row in rows:
            for name in row.values:
                if name in columns or name in seen:
                    continue
                seen.add(name)
                hint = suggest_name(name, columns)
                known = ", ".join(columns)
                text = f"{row.place}: {owner} has no column {name!r}{hint}; there are {known}"
                self._findings.append(text)

    # What is expected

    def _read_expectation(self, value: Any) -> Expectation:
        found = self._take_mapping(("expect",), value, _EXPECTED)
        tables = self._read_tables(("expect", "tables"), found.get("tables", {}))
        counters = self._read_counters(("expect", "counters"), found.get("counters", {}))
        error = found.get("error")
        return Expectation(
            tables,
            {name: self._locate(("expect", "tables", name)) for name in tables},
            {name: rows for name, (rows, _) in counters.items()},
            {name: self._locate(place) for name, (_, place) in counters.items()},
            None if error is None else str(error),
        )

    def _read_tables(self, place: Location, value: Any) -> dict[str, list[CaseRow]]:
        found = self._take_mapping(place, value, self._spec.table_names)
        return {
            table: self._read_rows(
                (*place, table),
                rows,
                f"table {table}",
                build_table_schema(self._spec, table).names,
            )
            for table, rows in found.items()
        }

    def _read_counters(self, place: Location, value: Any) -> dict[str, tuple[int, Location]]:
        if not isinstance(value, dict):
            self._note(place, f"a mapping is needed, of counters to rows; found {value!r}")
            return {}
        found: dict[str, tuple[int, Location]] = {}
        for name, rows in value.items():
            if name in self._spec.sources:
                own = self._read_counters((*place, name), rows)
                found |= {f"{name}.{count}": entry for count, entry in own.items()}
                continue
            if name.partition(":")[0] not in COUNTS:
                hint = suggest_name(name, COUNTS)
                self._note((*place, name), f"no such counter{hint}; there are {', '.join(COUNTS)}")
            if isinstance(rows, bool) or not isinstance(rows, int):
                self._note((*place, name), f"a number of rows is needed; found {rows!r}")
            found[name] = rows, (*place, name)
        return found
