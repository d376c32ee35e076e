"""The pipeline spec: the content of a YAML file under ``dags/pipelines/``, as frozen models.

The same models are the Python API: ``PipelineSpec(name="flights", sources={...}, ...)`` equals the
YAML.
"""

import hashlib
import json
from collections.abc import Iterable, Iterator
from typing import Any, Final, Literal

from pydantic import Field, model_validator

from tidegate.errors import suggest_name
from tidegate.json_types import JsonObject, read_data_file

from .event_time_options import (
    NEVER,
    BarrierOptions,
    CoalesceOptions,
    OrderOptions,
    ReleaseMode,
    SpecModel,
)
from .operations import (
    CheckpointSpec,
    OutputSpec,
    QualitySpec,
    SinkSpec,
    SparkSpec,
    SpliceSpec,
    SupervisionSpec,
)

# These two are part of the Python API of a pipeline, so that callers import them from here.
from .source_spec import (
    Name,
    SourceName,
    list_edge_conflicts,
    validate_column_type,
)
from .source_spec import ReadLimits as ReadLimits
from .source_spec import SourceSpec as SourceSpec
from .stream_specs import (
    REJECTIONS,
    PipeSpec,
    ReducerSpec,
    StreamGraph,
    StreamSpec,
)
from .table_layout import LAYOUT_COLUMNS, OWN_COLUMNS, WINDOW_COLUMNS, list_layout_problems
from .window_specs import WindowSpec

# A spec without the field is read as this version, so that a later version can tell old files
# apart.
API_VERSION: Final = "tidegate/v1"
_ADVICE_ON_KEYS = "; a key is a column, and 'select' of a source derives columns"
_ADVICE_ON_NAMES = "; upper and lower case are the same here, and 'select' of a source renames"
EVENTS: Final = "events"
LATE: Final = "late"
BARRIERS: Final = "barriers"
BUILT: Final = "built"
CHECKPOINTS: Final = "checkpoints"
DEAD_LETTERS: Final = "dead_letters"
EVENT_TIME: Final = "_event_time"
"""Column of the event time if sources keep it in different ones (`event_time_column`)."""
BATCH_RUN_MARK: Final = "__bf_"
"""Part of the names of batch runs, which `<p>.backfill` makes of the pipeline's own name.

The keys of a pipeline may write and delete below these names.
"""
NON_DATA_SECTIONS: Final = {"description", "quality", "supervision", "spark", "sinks", "splice"}
# Of `outputs`: they decide in which files rows are, not which rows there are, so a change of them
# needs no new state.
_NON_DATA_OUTPUT_FIELDS = {"layout", "compact", "file_mb"}
RESERVED_TABLES = frozenset({EVENTS, LATE, BUILT, BARRIERS, CHECKPOINTS, DEAD_LETTERS})


class PipelineSpec(SpecModel):
    """One pipeline, as in a YAML file under ``dags/pipelines/``."""

    api_version: Literal["tidegate/v1"] = Field(default=API_VERSION, alias="apiVersion")
    """Version of this format."""
    name: Name
    """Name of the pipeline; it prefixes keys, tables and DAG ids."""
    description: str = ""
    """Free text for people."""
    preset: Literal[
        "tidegate", "nscldaq", "streaminsight", "hazelcast", "flink", "pipet", "wire"
    ] = "tidegate"
    """System whose defaults the options take; see docs/presets.md."""
    sources: dict[SourceName, SourceSpec] = Field(min_length=1)
    """Source name and source. Event time is coalesced over all sources."""
    coalesce: CoalesceOptions = CoalesceOptions()
    """How the sources' frontiers join into the output frontier."""
    release: OrderOptions = OrderOptions()
    """When rows leave to the events table, and what happens to late ones."""
    barriers: BarrierOptions = BarrierOptions()
    """How barriers of several sources are paired and aligned."""
    windows: dict[Name, WindowSpec] = {}
    """Window name and window; each window is a table."""
    streams: dict[Name, StreamSpec] = {}
    """Streams that pipes and reducers write to. The stream `events` always exists."""
    pipes: dict[Name, PipeSpec] = {}
    """Pipe name and pipe: copies rows of one stream to another."""
    reducers: dict[Name, ReducerSpec] = {}
    """Reducer name and reducer: folds rows of a stream into new rows."""
    outputs: OutputSpec = OutputSpec()
    """Which tables are written, and where."""
    sinks: dict[Name, SinkSpec] = {}
    """Receivers besides the Iceberg tables: PostgreSQL, Kafka, files, a webhook."""
    checkpoint: CheckpointSpec = CheckpointSpec()
    """Pace of epochs, retention, and what happens to damaged checkpoints."""
    spark: SparkSpec = SparkSpec()
    """Settings of the driver's Spark session."""
    supervision: SupervisionSpec = SupervisionSpec()
    """What Airflow does with the pipeline."""
    quality: QualitySpec = QualitySpec()
    """Limits and severities of the quality checks."""
    splice: SpliceSpec = SpliceSpec()
    """When late rows are offered for a merge in Airflow."""

    @model_validator(mode="before")
    @classmethod
    def _apply_preset_defaults(cls, value: Any) -> Any:
        return apply_preset(value) if isinstance(value, dict) else value

    def _list_problems(self) -> Iterator[str]:
        yield from self._list_source_problems()
        yield from self._list_window_problems()
        # A misspelt table would otherwise be delivered never, without an error.
        for name, sink in self.sinks.items():
            unknown = sorted(set(sink.tables or ()) - set(self.table_names))
            if unknown:
                yield (
                    f"sinks.{name}.tables: no table {', '.join(unknown)}; there are"
                    f" {', '.join(self.table_names)}"
                )
        yield from list_edge_conflicts(self.sources, self.release, self.windows)
        clash = (RESERVED_TABLES | {REJECTIONS} | set(self.windows)) & set(self.streams)
        if clash:
            yield f"stream names {', '.join(sorted(clash))} are taken by tables or windows"
        for stream in self.streams.values():
            for kind in stream.columns.values():
                validate_column_type(kind)
        # Building the graph raises for unknown names, cycles and columns that do not fit.
        _ = self.stream_graph
        # Without the events table the order buffer would be state that no output shows.
        if not self.outputs.events and self.release.mode is not ReleaseMode.PASS_THROUGH:
            yield (
                "outputs.events: false leaves nothing to put in order; it needs release.mode:"
                " pass_through"
            )
        if not self.outputs.events and (self.pipes or self.reducers):
            yield "outputs.events: false leaves pipes and reducers nothing to read"
        yield from list_layout_problems(self.outputs.layout, self._layout_columns())

    def _list_source_problems(self) -> Iterator[str]:
        # The events and late tables hold the rows of all sources.
        first = next(iter(self.sources.values()))
        for name, source in self.sources.items():
            if dict(source.row_columns) != dict(first.row_columns):
                yield (
                    f"sources.{name}: all sources of a pipeline share one schema: the same columns"
                    " with the same types; a source with other columns needs a 'select'"
                )
        own = OWN_COLUMNS[LATE] | (OWN_COLUMNS[EVENTS] if self.outputs.events else {})
        if taken := _find_taken_names(self.columns, own):
            yield f"schema: names that the tables have already: {taken}{_ADVICE_ON_NAMES}"
        for name, source in self.sources.items():
            # A source that imports its own frontier, or one that does not exist, would hold the
            # output frontier without end.
            imported = source.punctuation.import_from if source.punctuation else None
            if imported is not None and (imported not in self.sources or imported == name):
                yield f"sources.{name}.punctuation.import_from: no other source named {imported!r}"

    def _list_window_problems(self) -> Iterator[str]:
        clash = RESERVED_TABLES & set(self.windows)
        if clash:
            yield f"window names {', '.join(sorted(clash))} are reserved for tables"
        for name, window in self.windows.items():
            missing = [k for k in window.keys if k not in self.columns and k != "_source"]
            if missing:
                is_name = "(" not in missing[0]
                hint = suggest_name(missing[0], self.columns) if is_name else _ADVICE_ON_KEYS
                yield (
                    f"windows.{name}.keys: no column {', '.join(missing)} in the schema (or"
                    f" '_source'){hint}"
                )
            own = (*WINDOW_COLUMNS, "replaces")
            if taken := _find_taken_names(window.keys, own):
                yield f"windows.{name}.keys: names already taken: {taken}{_ADVICE_ON_NAMES}"
            if taken := _find_taken_names(window.aggregates, (*own, *window.keys)):
                yield f"windows.{name}.aggregates: names already taken: {taken}"

    def _layout_columns(self) -> dict[str, dict[str, str]]:
        """Table -> column -> type, as far as files can be arranged by it."""
        user: dict[str, dict[str, str]] = dict.fromkeys((EVENTS, LATE), self.columns)
        for name, window in self.windows.items():
            user[name] = {
                key: self.columns.get(key, "string") for key in window.keys
            } | WINDOW_COLUMNS
        for name in self.streams:
            user[name] = {**self.stream_graph.columns[name], **LAYOUT_COLUMNS["<stream>"]}
        return {
            table: {**user.get(table, {}), **LAYOUT_COLUMNS.get(table, {})}
            for table in self.table_names
        }

    @property
    def stream_graph(self) -> StreamGraph:
        """The streams in the order in which rows are dispatched, with columns and attachments."""
        return StreamGraph.build(self.columns, self.streams, self.pipes, self.reducers)

    @property
    def columns(self) -> dict[str, str]:
        """The one schema that the rows of all sources share, behind `select`."""
        return next(iter(self.sources.values())).row_columns

    @property
    def event_time_column(self) -> str:
        """The column of the events and late tables that holds the event time of every row.

        Sources may keep it in different columns of the shared schema. Then the tables have one
        more column, `_event_time`, because files, streams and merges need one name for all rows.
        """
        names = {source.event_time for source in self.sources.values()}
        return names.pop() if len(names) == 1 else EVENT_TIME

    @property
    def row_columns(self) -> dict[str, str]:
        """Columns of the events and late tables: the schema, and `_event_time` if needed."""
        added = {EVENT_TIME: "timestamp"} if self.event_time_column == EVENT_TIME else {}
        return {**self.columns, **added}

    @property
    def barrier_timeout(self) -> int | None:
        """Ticks until an open barrier times out; None for never.

        It is `barriers.timeout`, and without that four times `release.build_window`.
        """
        if self.barriers.timeout is not None:
            return None if self.barriers.timeout == NEVER else self.barriers.timeout
        # The factor is NSCLDAQ's (docs/semantics.md, section 2).
        window = self.release.build_window
        return None if window is None else 4 * window

    @property
    def table_names(self) -> tuple[str, ...]:
        """Names of all output tables; `events` is one even if `outputs.events` is off."""
        streams = (*self.streams, REJECTIONS) if self.streams else ()
        built = (BUILT,) if self.release.glom is not None else ()
        return (EVENTS, LATE, *built, *self.windows, *streams, BARRIERS, CHECKPOINTS, DEAD_LETTERS)

    def digest(self) -> str:
        """Return the SHA-256, in hex, of all options on which rows depend; every manifest names it.

        `NON_DATA_SECTIONS` and the arrangement of table files do not count. All others do, also
        those that change no row, such as `checkpoint` and the read limits of sources.
        """
        # Sections that no row depends on are left out: otherwise raising a limit or a timeout would
        # look like a change of the data, and would be checked against the state.
        beside: Any = {**dict.fromkeys(NON_DATA_SECTIONS, True), "outputs": _NON_DATA_OUTPUT_FIELDS}
        fields = self.model_dump(mode="json", by_alias=True, exclude=beside)
        # Without an order, so that specs in the order of the alphabet keep their digest.
        orders = {path: names for path, names in self.orders.items() if names != sorted(names)}
        return hashlib.sha256(
            json.dumps(
                [fields, orders] if orders else fields, sort_keys=True, separators=(",", ":")
            ).encode()
        ).hexdigest()

    @property
    def orders(self) -> dict[str, list[str]]:
        """Dotted field -> its names, for the mappings whose order decides something.

        Sources (rows of one time), rules (which one removes a row), pipes and reducers (rows of one
        stream); and aggregates, whose partial results are numbered in segments.
        """
        return {
            "sources": list(self.sources),
            "pipes": list(self.pipes),
            "reducers": list(self.reducers),
            **{f"sources.{name}.rules": list(one.rules) for name, one in self.sources.items()},
            **{f"windows.{n}.aggregates": list(one.aggregates) for n, one in self.windows.items()},
        }

    def canonical_json(self) -> str:
        """Return the JSON of the spec with preset and defaults applied, names in their order.

        Secrets in it are not masked (`mask_secrets`).
        """
        return json.dumps(self.model_dump(mode="json", by_alias=True), separators=(",", ":"))


# Presets: the defaults of six systems that users may know (docs/semantics.md, section 8).
# A preset only sets defaults. What the YAML of the pipeline itself says wins, field by field.

PRESETS: dict[str, JsonObject] = read_data_file(__package__, "presets.toml")
"""Preset and its defaults for sources, coalescing, release, barriers, windows and sessions."""


def _find_taken_names(names: Iterable[str], own: Iterable[str]) -> str:
    """Those names that a table has already, in upper or lower case; the table has `own` columns."""
    known = {name.lower() for name in own}
    taken = []
    for name in names:
        if name.lower() in known:
            taken.append(name)
        known.add(name.lower())
    return ", ".join(sorted(taken))


def apply_preset(raw: JsonObject) -> JsonObject:
    """Return the raw spec with its preset's defaults in the fields that the spec leaves out.

    The argument is not changed. It is returned itself if its preset has no defaults, is unknown or
    is not a text.
    """
    name = raw.get("preset", "tidegate")
    preset = PRESETS.get(name) if isinstance(name, str) else None
    if not preset:
        return raw
    sources, windows = (_select_mappings(raw.get(section)) for section in ("sources", "windows"))
    # In StreamInsight the two ways to advance time have different policies for late events, and the
    # release belongs to the whole pipeline.
    if any(map(_has_declared_frontier, sources.values())):
        preset = {**preset, "release": preset.get("declared_release", preset.get("release", {}))}
    merged = dict(raw)
    for section in ("coalesce", "release", "barriers"):
        if section in preset:
            merged[section] = _merge_defaults(preset[section], raw.get(section, {}))
    # An empty or misspelt section stays as it is: the models report it with its line.
    if sources:
        own = {name: _apply_to_source(preset, source) for name, source in sources.items()}
        merged["sources"] = raw["sources"] | own
    if windows:
        own = {name: _apply_to_window(preset, window) for name, window in windows.items()}
        merged["windows"] = raw["windows"] | own
    return merged


def _has_declared_frontier(source: JsonObject) -> bool:
    """Whether a source's frontier follows from settings, not from punctuation rows of its own."""
    punctuation = source.get("punctuation")
    generated = isinstance(punctuation, dict) and any(
        punctuation.get(k) is not None for k in ("every_events", "every_span")
    )
    return generated or source.get("lag") is not None


def _apply_to_source(preset: JsonObject, source: JsonObject) -> Any:
    defaults = dict(preset.get("source", {}))
    if _has_declared_frontier(source):
        defaults = dict(preset.get("declared", defaults))
    has_punctuation = isinstance(source.get("punctuation"), dict)
    # Only sources that have a punctuation get its defaults: alone they would switch it on.
    if has_punctuation and "punctuated" in preset:
        defaults["punctuation"] = preset["punctuated"]
    if not has_punctuation and _has_declared_frontier(source):
        defaults.pop("punctuation", None)  # a lag needs no punctuation
    if all(source.get(name) is None for name in ("lag", "punctuation", "wall_clock")):
        defaults |= preset.get("undeclared", {})
    return _merge_defaults(defaults, source)


def _apply_to_window(preset: JsonObject, window: JsonObject) -> Any:
    defaults = dict(preset.get("window", {}))
    if window.get("kind") == "session":
        defaults |= preset.get("session", {})
    return _merge_defaults(defaults, window)


def _select_mappings(section: Any) -> dict[str, JsonObject]:
    """The entries of a section that are as they should be."""
    entries = section.items() if isinstance(section, dict) else ()
    return {name: own for name, own in entries if isinstance(own, dict)}


def _merge_defaults(defaults: Any, own: Any) -> Any:
    """Own values win; nested sections merge field by field."""
    # Lists are replaced as a whole: adding to a default list could not be undone in YAML.
    if not isinstance(defaults, dict) or not isinstance(own, dict):
        return own
    return {**defaults, **{k: _merge_defaults(defaults.get(k), v) for k, v in own.items()}}
