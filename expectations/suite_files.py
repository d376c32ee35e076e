"""Suites as data: the YAML files in `suites/` and in a pipeline's folder, as frozen models.

Fast to import: Great Expectations is not needed here.
"""

from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, date, datetime
from functools import cache
from importlib import resources
from importlib.resources.abc import Traversable
from math import isfinite
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, ValidationError, field_validator

from tidegate.jobs.spec.event_time_options import SpecModel
from tidegate.jobs.spec.job_spec import JobSpec
from tidegate.jobs.spec.loader import Location, format_findings, to_plain_value
from tidegate.jobs.spec.operations import QualityLimits, QualitySpec, Severity
from tidegate.jobs.spec.pipeline import PipelineSpec
from tidegate.jobs.spec.yaml_text import read_yaml
from tidegate.json_types import JsonObject

from .errors import BAD_SUITE, CHECK_IDS_DOUBLED, NO_SUITE_FOLDER, UNKNOWN_CHECK
from .job_batches import JOB_SUMMARIES
from .summaries import SUMMARIES, TABLE_PREFIX, find_column_kind, list_frame_columns

_DURATION_LIMITS = {
    *("lateness_p99", "checkpoint_age", "seal_p95", "freshness"),
    *("barrier_waited_p99", "barrier_complete_p99", "barrier_held_p99"),
}
_TICKS_PER_SECOND = 1_000_000
_COLUMN_ARGUMENTS = ("column", "column_A", "column_B", "column_list")


Need = Literal["barriers", "streams", "windows", "events", "rules", "freshness"]
Scope = Literal["recent", "all"]


def _to_text(value: Any) -> Any:
    if isinstance(value, datetime):
        zoned = value if value.tzinfo else value.replace(tzinfo=UTC)
        return zoned.isoformat()
    if isinstance(value, date):
        return value.isoformat()
    if isinstance(value, list | tuple):
        return [_to_text(one) for one in value]
    return value


def _flatten_values(value: Any) -> Iterator[Any]:
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, list | tuple):
        for one in value:
            yield from _flatten_values(one)
    else:
        yield value


class Check(SpecModel):
    """One expectation of a suite.

    A failed check with the severity `critical` fails the quality run; `off` leaves the check out.
    The spec's `quality.severity` replaces the severity.
    """

    id: Annotated[str, Field(pattern=r"^[a-z][a-z0-9_]*$")]
    summary: str
    """The frame it looks at, see summaries.py; ``table.NAME`` for the recent rows of a table."""
    expect: Annotated[str, Field(pattern=r"^expect_[a-z_]+$")]
    """Name of a Great Expectations type."""
    kwargs: JsonObject = {}
    """Its arguments; ``{limit: NAME}`` is replaced by a limit of the pipeline."""
    severity: Severity = "warn"
    scope: Scope = "recent"
    """Whether it judges the recent epochs, or the whole past.

    A check of the whole past says nothing about single checkpoints: `recover_to: latest_healthy`
    does not ask it.
    """
    needs: Need | None = None
    """What a pipeline must have, or the check is left out."""
    owner: str | None = None
    """Who looks after it; without it the suite's owner, then that of the pipeline."""
    says: str
    """What holds when it passes, as a sentence for people; ``{NAME}`` shows a limit."""

    def _list_problems(self) -> Iterator[str]:
        if self.summary.startswith(TABLE_PREFIX) and self.scope == "all":
            yield "a check of a table looks at recent rows; leave scope out"
        for name, value in self.kwargs.items():
            if any(isinstance(one, float) and not isfinite(one) for one in _flatten_values(value)):
                yield f"{name}: nothing can be compared with {value}; leave an open end out"
        known = QualityLimits.model_fields
        for value in self.kwargs.values():
            if isinstance(value, dict) and "limit" in value and value["limit"] not in known:
                yield f"no limit {value['limit']!r}; there are: {', '.join(known)}"

    @field_validator("kwargs", mode="before")
    @classmethod
    def _write_times_as_text(cls, kwargs: Any) -> Any:
        """YAML makes a time of what looks like one; columns are compared with its text."""
        if not isinstance(kwargs, dict):
            return kwargs
        return {name: _to_text(value) for name, value in kwargs.items()}

    def resolve_kwargs(self, limits: dict[str, float]) -> JsonObject:
        """Return the arguments of the expectation, with the limits filled in."""
        return {
            k: limits[v["limit"]] if isinstance(v, dict) and "limit" in v else v
            for k, v in self.kwargs.items()
        }


class Suite(SpecModel):
    """One suite file."""

    suite: Annotated[str, Field(pattern=r"^[a-z][a-z0-9_]*$")]
    title: str
    owner: str | None = None
    """Who looks after its checks; without it `quality.owner`, then `supervision.owner`."""
    needs: Need | None = None
    """What a pipeline must have, or the suite is left out."""
    checks: tuple[Check, ...] = Field(min_length=1)


def limit_values(spec: PipelineSpec | JobSpec | None = None) -> dict[str, float]:
    """Return the limits as plain numbers; durations in seconds. Without a spec the defaults.

    Without a limit for freshness that of the supervision counts. A driver waits when its tables
    lack `outputs.max_unpublished` epochs, so half of it is the default for unpublished ones.
    """
    limits = spec.quality.limits if spec else QualityLimits()
    freshness = limits.freshness or (spec.supervision.freshness if spec else None) or 0
    unpublished = limits.unpublished
    if unpublished is None:
        most = spec.outputs.max_unpublished if isinstance(spec, PipelineSpec) else 50
        unpublished = max(1, most // 2)
    plain: dict[str, float] = limits.model_dump()
    plain |= {"freshness": freshness, "unpublished": unpublished}
    return {k: v / _TICKS_PER_SECOND if k in _DURATION_LIMITS else v for k, v in plain.items()}


def find_suites(spec: PipelineSpec | JobSpec, folder: Path) -> PipelineSpec | JobSpec:
    """The spec with its folder of suites, if that lies next to the file of the spec in `folder`."""
    suites = spec.quality.suites
    if suites is None or not (folder / suites).is_dir():
        return spec
    quality = spec.quality.model_copy(update={"suites": str(folder / suites)})
    return spec.model_copy(update={"quality": quality})


def load_suites(spec: PipelineSpec | JobSpec) -> list[Suite]:
    """Load the built-in suites and those in the folder `quality.suites`.

    The folder is relative to the working folder. A file there replaces the built-in one of the same
    name. Severities are the pipeline's. Checks that are off or need what the pipeline does not have
    are left out, and so are suites without a check left.

    Raises:
        ConfigurationError: a suite file is wrong, `quality` names a folder or a check that does not
            exist, two checks have one id, or a check of the own folder names a table or column that
            the pipeline does not have.
    """
    quality = spec.quality
    suites = dict(_load_built_in_suites(of_jobs=isinstance(spec, JobSpec)))
    if quality.suites is not None:
        own = Path(quality.suites)
        if not own.is_dir():
            raise NO_SUITE_FOLDER(pipeline=spec.name, folder=own.absolute())
        # All files are loaded before checks are selected: a wrong file must not hide behind a
        # pipeline that does not need it.
        suites |= {f.name: _load_suite(f, spec) for f in _list_suite_files(own)}
    loaded = [suite for _, suite in sorted(suites.items())]
    known = [check.id for suite in loaded for check in suite.checks]
    unknown = sorted(set(spec.quality.severity) - set(known))
    # Severities and results are stored by id.
    doubled = sorted({i for i in known if known.count(i) > 1})
    if unknown or doubled:
        entry = UNKNOWN_CHECK if unknown else CHECK_IDS_DOUBLED
        names = ", ".join(unknown or doubled)
        raise entry(pipeline=spec.name, names=names, known=", ".join(known))
    had = _list_parts(spec)
    needed = [suite for suite in loaded if suite.needs is None or suite.needs in had]
    owner = quality.owner or spec.supervision.owner
    selected = (_select_checks(suite, quality, had, owner) for suite in needed)
    return [suite for suite in selected if suite is not None]


@cache
def _load_built_in_suites(*, of_jobs: bool) -> Mapping[str, Suite]:
    """File name -> suite; read once, for a quality run asks for them several times."""
    # Through importlib.resources, because the package may be read from a zip file.
    folder: Traversable = resources.files("tidegate.expectations") / "suites"
    if of_jobs:
        folder /= "jobs"
    return {file.name: _load_suite(file) for file in _list_suite_files(folder)}


def _list_parts(spec: PipelineSpec | JobSpec) -> set[Need]:
    """What the pipeline has, of what checks may need; a job has nothing of it."""
    if isinstance(spec, JobSpec):
        return set()
    parts: dict[Need, object] = {
        "barriers": any(s.barriers and s.barriers.types for s in spec.sources.values()),
        "streams": spec.streams,
        "windows": spec.windows,
        "events": spec.outputs.events,
        "rules": any(s.rules for s in spec.sources.values()),
        "freshness": spec.quality.limits.freshness or spec.supervision.freshness,
    }
    return {name for name, part in parts.items() if part}


def _list_suite_files(folder: Traversable) -> list[Traversable]:
    return [f for f in folder.iterdir() if f.name.endswith((".yaml", ".yml"))]


def _load_suite(file: Traversable, spec: PipelineSpec | JobSpec | None = None) -> Suite:
    """Load one file; with a spec, its tables and columns have to exist in the pipeline."""
    try:
        raw = read_yaml(file.read_text("utf-8"))
        suite = Suite.model_validate(to_plain_value(raw))
        mistakes = _list_unknown_names(spec, suite) if spec else []
        for check in suite.checks:
            # Formatted once now: an unknown limit in the sentence would otherwise fail in the
            # night.
            check.says.format(**limit_values())
    except ValidationError as error:
        mistakes = [(e["loc"], e["msg"].removeprefix("Value error, ")) for e in error.errors()]
    except (KeyError, ValueError) as error:
        raise BAD_SUITE(mistakes=f"{file}: {error}") from error
    if mistakes:
        raise BAD_SUITE(mistakes="\n".join(format_findings(str(file), raw, mistakes)))
    return suite


def list_checked_tables(suites: list[Suite]) -> list[str]:
    """Return the names of the tables that checks look at directly, not through a summary."""
    summaries = {check.summary for suite in suites for check in suite.checks}
    return sorted(s.removeprefix(TABLE_PREFIX) for s in summaries if s.startswith(TABLE_PREFIX))


def _list_unknown_names(spec: PipelineSpec | JobSpec, suite: Suite) -> list[tuple[Location, str]]:
    """Summaries, tables and columns that checks name and the pipeline or job does not have."""
    mistakes: list[tuple[Location, str]] = []
    is_job, tables = isinstance(spec, JobSpec), getattr(spec, "table_names", ())
    own = tuple(JOB_SUMMARIES if is_job else SUMMARIES)
    for place, check in enumerate(suite.checks):
        name = check.summary.removeprefix(TABLE_PREFIX)
        what, known = ("summary", own) if name == check.summary else ("table", tables)
        if name not in known:
            more = ", and table.NAME" if known is own and not is_job else ""
            names = ", ".join(known) or "none"
            says = f"{spec.name} has no {what} {name!r}; there are: {names}{more}"
            mistakes.append((("checks", place, "summary"), says))
            continue
        named = {key: check.kwargs[key] for key in _COLUMN_ARGUMENTS if key in check.kwargs}
        columns = list_frame_columns(spec, check.summary) if named else []
        for key, given in named.items():
            for column in {*([given] if isinstance(given, str) else given)} - {*columns}:
                says = f"no column {column!r} in {check.summary}; there are: {', '.join(columns)}"
                mistakes.append((("checks", place, "kwargs", key), says))
        if not isinstance(spec, JobSpec):
            mistakes += [
                (("checks", place, "kwargs", key), says)
                for key, says in _list_bad_limits(spec, check, columns)
            ]
    return mistakes


def _list_bad_limits(
    spec: PipelineSpec, check: Check, columns: Sequence[str]
) -> Iterator[tuple[str, str]]:
    """Limits with which the values of a table's column cannot be compared."""
    column = check.kwargs.get("column")
    table = check.summary.removeprefix(TABLE_PREFIX)
    is_table = table != check.summary and column in columns and column != "_row"
    if not isinstance(column, str) or not is_table or check.expect not in _COMPARING_TYPES:
        return
    kind = find_column_kind(spec, table, column)
    for key in ("min_value", "max_value"):
        limit = check.kwargs.get(key)
        if limit is not None and kind is not None and not _can_compare(kind, limit):
            says = f"{column} of {table} holds a {kind}, which cannot be compared with {limit!r}"
            yield key, says + ("; write 2026-01-31T00:00:00Z" if kind == "time" else "")


# These compare the values of a column with `min_value` and `max_value`.
_COMPARING_TYPES = (
    "expect_column_values_to_be_between",
    "expect_column_min_to_be_between",
    "expect_column_max_to_be_between",
)


def _can_compare(kind: str, limit: Any) -> bool:
    if kind == "number":  # a named limit is a number
        is_number = isinstance(limit, int | float) and not isinstance(limit, bool)
        return is_number or isinstance(limit, dict)
    if kind == "text" or not isinstance(limit, str):
        return isinstance(limit, str)
    try:
        # The columns have a zone, and a time without one cannot be compared with them.
        return datetime.fromisoformat(limit).tzinfo is not None
    except ValueError:
        return False


def _select_checks(suite: Suite, quality: QualitySpec, had: set[Need], owner: str) -> Suite | None:
    """The suite with the pipeline's severities and owners, without what is off.

    None when nothing is left.

    Checks of what the pipeline does not have are left out as well.
    """
    wanted = [
        c.model_copy(
            update={
                "severity": quality.severity.get(c.id, c.severity),
                "owner": c.owner or suite.owner or owner,
            }
        )
        for c in suite.checks
        if c.needs is None or c.needs in had
    ]
    # An empty suite would appear in the Data Docs as one that passed.
    kept = tuple(c for c in wanted if c.severity != "off")
    return suite.model_copy(update={"checks": kept}) if kept else None
