"""Runs the suites over the summaries with Great Expectations, and collects the results.

A failed check comes with a sample of the rows behind it.

Great Expectations is imported inside the functions, as in `quality_run`: it takes seconds and
300 MB.
"""

from __future__ import annotations

import logging
import os
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import isfinite
from typing import TYPE_CHECKING, Any

import pandas as pd
import pyarrow as pa

from tidegate.jobs.rules.duck_frame import select_rows
from tidegate.jobs.spec.pipeline import BARRIERS, CHECKPOINTS, DEAD_LETTERS, EVENTS, LATE
from tidegate.jobs.spec.row_rules import RULE_QUARANTINED
from tidegate.jobs.spec.stream_specs import REJECTIONS
from tidegate.json_types import JsonObject

from .evidence import ORIGIN, Evidence
from .job_batches import JobEvidence
from .suite_files import Check, Suite, limit_values, load_suites
from .summaries import (
    TABLE_PREFIX,
    build_frame,
    name_rows,
)

if TYPE_CHECKING:
    from great_expectations.core.batch_definition import BatchDefinition
    from great_expectations.core.expectation_validation_result import (
        ExpectationSuiteValidationResult,
        ExpectationValidationResult,
    )
    from great_expectations.data_context.data_context.abstract_data_context import (
        AbstractDataContext,
    )

_OFFENDERS_SHOWN = 5  # offenders named per check; the Data Docs list all of them
SAMPLE_ROWS = 5
"""Rows that a failed check shows of those behind it."""
_TROUBLE_LENGTH = 300  # characters of the reason why a check could not run
_ROWS_NAMED = 50  # in the command that shows them; a longer one does not fit a shell's line


@dataclass(frozen=True)
class CheckResult:
    """The result of one check.

    Attributes:
        severity: ``critical`` or ``warn``.
        observed: the values it looked at, in words; of a failure the first five that broke it.
        offenders: the rows of the summary that broke it, as ``first column: value``; only the value
            in a summary of one row.
        expected: the resolved arguments of the expectation.
        scope: ``recent`` or ``all``, see `Check`.
        epochs: first and last epoch that a failure is about; None if it passed, or if the check
            judges the whole past.
        sample: the newest of the rows behind a failure; see `RowSample`.
        command: shows these rows; empty if the check passed.
        owner: who looks after the check.
        value: the value of the summary that is nearest to the limit or farthest beyond it; of a
            check without a numeric limit, how many rows of the summary broke it.
        limit: what `value` may be at most, or with `is_least` at least.
        trouble: why the check could not run; empty if it could.
        page_suffix: of its page, if it is about a slice before the newest epochs.
    """

    id: str
    suite: str
    summary: str
    severity: str
    says: str
    passed: bool
    observed: str
    offenders: tuple[str, ...]
    expected: JsonObject
    scope: str = "recent"
    epochs: tuple[int, int] | None = None
    sample: tuple[JsonObject, ...] = ()
    command: str = ""
    owner: str = ""
    value: float | None = None
    limit: float | None = None
    is_least: bool = False
    trouble: str = ""
    page_suffix: str = ""

    @property
    def page_name(self) -> str:
        """Name of its Data Docs page."""
        return f"{self.suite}.{self.summary}{self.page_suffix}"


@dataclass(frozen=True)
class RunResult:
    """The results of all checks.

    Attributes:
        checks: passed and failed ones, in the order of the suites; of several slices the newest
            failure.
        frames: the summaries that were looked at, by name.
        titles: suite -> its title.
        validations: page -> GX's own result, which the Data Docs are rendered from.
        newest: all checks over the newest epochs alone.
        older: all checks over each older slice.
    """

    checks: tuple[CheckResult, ...]
    frames: Mapping[str, pd.DataFrame]
    titles: Mapping[str, str]
    validations: Mapping[str, Any]
    newest: tuple[CheckResult, ...] = ()
    older: tuple[tuple[CheckResult, ...], ...] = ()

    @property
    def failed_checks(self) -> tuple[CheckResult, ...]:
        """Failed checks, critical ones first."""
        return tuple(sorted((c for c in self.checks if not c.passed), key=lambda c: c.severity))

    @property
    def verdict(self) -> str:
        """``fail`` if a critical check failed, ``warn`` if any other did, otherwise ``pass``."""
        if any(c.severity == "critical" for c in self.failed_checks):
            return "fail"
        return "warn" if self.failed_checks else "pass"


def run_suites(
    evidence: Evidence | JobEvidence, older: Sequence[Evidence | JobEvidence] = ()
) -> RunResult:
    """Run all suites over the newest epochs, and the checks of recent epochs over older slices.

    A check that cannot be computed is critical and failed; it stops no other check.

    Raises:
        ConfigurationError: a suite is wrong.
    """
    suites = load_suites(evidence.spec)
    limits = limit_values(evidence.spec)
    with warnings.catch_warnings():
        # GX and its dependencies warn about themselves; our own code has run by now.
        warnings.simplefilter("ignore")
        # One asset for all frames: with each that is added, GX writes its whole configuration.
        source = _make_gx_context().data_sources.add_pandas("summaries")
        asset = source.add_dataframe_asset("frames")
        any_frame = asset.add_batch_definition_whole_dataframe("any")
        newest = _judge_slice(any_frame, suites, evidence, limits)
        slices = [_judge_slice(any_frame, suites, one, limits) for one in older]
    found = [newest, *reversed(slices)]
    shown = tuple(
        _pick_shown(results) for results in zip(*(part.checks for part in found), strict=True)
    )
    validations = {name: page for part in found for name, page in part.validations.items()}
    return RunResult(
        checks=shown,
        frames=newest.frames,
        titles={s.suite: s.title for s in suites},
        validations=validations,
        newest=newest.checks,
        older=tuple(part.checks for part in slices),
    )


def _pick_shown(results: Sequence[CheckResult]) -> CheckResult:
    """Of one check's results in slices, newest first: the newest failure, else the newest."""
    return next((one for one in results if not one.passed), results[0])


@dataclass(frozen=True)
class _SliceResult:
    checks: tuple[CheckResult, ...]
    frames: Mapping[str, pd.DataFrame]
    validations: Mapping[str, Any]


def _judge_slice(
    any_frame: BatchDefinition[Any],
    suites: Sequence[Suite],
    evidence: Evidence | JobEvidence,
    limits: dict[str, float],
) -> _SliceResult:
    """Run all checks over one slice; those of the whole past pass in an older one.

    An older slice has pages only of what failed, so that a long time between two runs makes few.
    """
    checks: list[CheckResult] = []
    frames: dict[str, pd.DataFrame] = {}
    validations: JsonObject = {}
    suffix = ""
    if evidence.is_older and evidence.head is not None:
        suffix = f".{evidence.recent_since + 1}-{evidence.head.slot}"
    for suite in suites:
        for summary in dict.fromkeys(c.summary for c in suite.checks):
            part = [c for c in suite.checks if c.summary == summary]
            found, page = _validate_summary(any_frame, suite, part, evidence, limits, frames)
            results = [
                replace(one, page_suffix=suffix) if suffix and not one.passed else one
                for one in found
            ]
            checks += results
            if page is not None and not (suffix and all(one.passed for one in results)):
                validations[f"{suite.suite}.{summary}{suffix}"] = page
    return _SliceResult(tuple(checks), frames, validations)


def _validate_summary(
    any_frame: BatchDefinition[Any],
    suite: Suite,
    checks: Sequence[Check],
    evidence: Evidence | JobEvidence,
    limits: dict[str, float],
    frames: dict[str, pd.DataFrame],
) -> tuple[list[CheckResult], ExpectationSuiteValidationResult | None]:
    """The results of a suite's checks of one summary, and GX's own result.

    The summary is added to the frames.
    """
    import great_expectations as gx

    name = checks[0].summary
    try:
        frame = frames.setdefault(name, build_frame(evidence, name))
    except (*_COMPUTING_ERRORS, KeyError) as error:
        return [_make_trouble(suite.suite, c, limits, str(error)) for c in checks], None
    expectations, troubles = [], dict[str, str]()
    for check in checks:
        if check.scope == "all" and evidence.is_older:
            continue
        try:
            expectations.append(_build_expectation(gx.expectations, check, limits))
        except _COMPUTING_ERRORS as error:
            troubles[check.id] = str(error)
    page = f"{suite.suite}.{name}"
    validation = None
    if expectations:
        batch = any_frame.get_batch(batch_parameters={"dataframe": frame})
        validation = batch.validate(
            gx.ExpectationSuite(name=page, expectations=expectations),
            result_format={
                "result_format": "COMPLETE",
                "unexpected_index_column_names": [str(frame.columns[0])],
            },
        )
    by_id = {
        result.expectation_config.meta["check"]: result
        for result in (validation.results if validation else ())
        if result.expectation_config and result.expectation_config.meta
    }
    results = []
    for check in checks:
        if check.id in troubles:
            results.append(_make_trouble(suite.suite, check, limits, troubles[check.id]))
        elif check.id not in by_id:
            results.append(_make_passed(suite.suite, check, limits))
        elif cause := _find_trouble(by_id[check.id]):
            results.append(_make_trouble(suite.suite, check, limits, cause))
        else:
            results.append(
                _interpret_validation(suite.suite, check, by_id[check.id], frame, evidence, limits)
            )
    return results, validation


# What a wrong check may raise when its expectation is made or its frame is built.
_COMPUTING_ERRORS = (
    *(TypeError, ValueError, AttributeError, LookupError, ArithmeticError),
    pa.ArrowException,
)


def _find_trouble(found: ExpectationValidationResult) -> str:
    """Why an expectation could not be computed; empty if it could."""
    info = found.exception_info
    parts: list[Mapping[str, Any]] = [info, *(v for v in info.values() if isinstance(v, dict))]
    if not any(part.get("raised_exception") for part in parts):
        return ""
    messages = [part.get("exception_message") for part in parts]
    return next((str(m) for m in messages if m), "it could not be computed")


def _make_passed(suite: str, check: Check, limits: dict[str, float]) -> CheckResult:
    return CheckResult(
        id=check.id,
        suite=suite,
        summary=check.summary,
        severity=check.severity,
        says=check.says.format(**limits),
        passed=True,
        observed="judged with the newest epochs",
        offenders=(),
        expected=check.resolve_kwargs(limits),
        scope=check.scope,
        owner=check.owner or "",
    )


def _make_trouble(suite: str, check: Check, limits: dict[str, float], cause: str) -> CheckResult:
    """The result of a check that could not run: it fails, and says nothing about any epoch."""
    cause = " ".join(cause.split())[:_TROUBLE_LENGTH]
    return replace(
        _make_passed(suite, check, limits),
        passed=False,
        severity="critical",
        observed=f"it could not run on {check.summary}: {cause}; correct it in its suite file",
        trouble=cause,
    )


def load_great_expectations() -> None:
    """Import Great Expectations, with its analytics off. Takes 3 s on a quiet machine."""
    os.environ["GX_ANALYTICS_ENABLED"] = "false"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import great_expectations  # noqa: F401


def _make_gx_context() -> AbstractDataContext:
    """A context in memory; no analytics, no progress bars, no network, no files."""
    load_great_expectations()
    import great_expectations as gx
    from great_expectations.data_context.types.base import (
        DataContextConfig,
        InMemoryStoreBackendDefaults,
        ProgressBarsConfig,
    )

    logging.getLogger("great_expectations").setLevel(logging.ERROR)
    config = DataContextConfig(
        store_backend_defaults=InMemoryStoreBackendDefaults(init_temp_docs_sites=False),
        progress_bars=ProgressBarsConfig(globally=False),
        analytics_enabled=False,
    )
    return gx.get_context(mode="ephemeral", project_config=config)


def _build_expectation(library: Any, check: Check, limits: dict[str, float]) -> Any:
    """The GX object of a check."""
    kind = getattr(library, "".join(part.title() for part in check.expect.split("_")), None)
    if kind is None:
        message = f"Great Expectations has no {check.expect}"
        raise ValueError(message)
    severity = {"critical": "critical", "warn": "warning"}[check.severity]
    return kind(
        **check.resolve_kwargs(limits),
        description=check.says.format(**limits),
        severity=severity,
        meta={"check": check.id},
    )


def _interpret_validation(
    suite: str,
    check: Check,
    found: ExpectationValidationResult,
    frame: pd.DataFrame,
    evidence: Evidence | JobEvidence,
    limits: dict[str, float],
) -> CheckResult:
    key, column = str(frame.columns[0]), check.kwargs.get("column")
    rows = found.result.get("unexpected_index_list") or []
    named = [(row[key], row[column]) for row in rows if key in row and column in row]
    alone = key in (column, "pipeline")  # a frame of one row has no other row to name
    offenders = tuple(
        format_number(value) if alone else f"{name}: {format_number(value)}"
        for name, value in named
    )
    failure: JsonObject = {}
    if not found.success:
        names = _list_offender_names(found, frame)
        recent = check.scope == "recent"
        shown = sample_rows(evidence, check.summary, names, recent=recent)
        failure = {
            "epochs": _find_judged_epochs(check, names, frame, evidence),
            "sample": shown.rows,
            "command": shown.command,
        }
    value, limit, is_least = _compare_with_limit(found, frame, check, limits)
    return replace(
        _make_passed(suite, check, limits),
        passed=bool(found.success),
        observed=_describe_observed(found, frame, check, offenders),
        offenders=offenders,
        value=value,
        limit=limit,
        is_least=is_least,
        **failure,
    )


def _compare_with_limit(
    found: ExpectationValidationResult, frame: pd.DataFrame, check: Check, limits: dict[str, float]
) -> tuple[float | None, float | None, bool]:
    """`value`, `limit` and `is_least` of a result; a value that JSON cannot hold is None."""
    kwargs = check.resolve_kwargs(limits)
    most, least = kwargs.get("max_value"), kwargs.get("min_value")
    values = frame[column] if (column := kwargs.get("column")) in frame else pd.Series(dtype=float)
    if most is None and least is None:
        broken = found.result.get("unexpected_count")
        return (None if broken is None else float(broken)), 0.0, False
    limit = least if most is None else most
    if not isinstance(limit, int | float):  # a time, for example
        return None, None, most is None
    values = pd.to_numeric(values, errors="coerce")
    worst = values.min() if most is None else values.max()
    is_number = not pd.isna(worst) and isfinite(worst)
    return float(worst) if is_number else None, limit, most is None


def _list_offender_names(
    found: ExpectationValidationResult, frame: pd.DataFrame
) -> list[str | int]:
    """First column of every row of the summary that broke the check."""
    key = str(frame.columns[0])
    rows = found.result.get("unexpected_index_list") or []
    names = [row[key] for row in rows if key in row]
    return [name.item() if hasattr(name, "item") else name for name in names]


def _find_judged_epochs(
    check: Check, names: Sequence[str | int], frame: pd.DataFrame, evidence: Evidence | JobEvidence
) -> tuple[int, int] | None:
    """First and last epoch that a failure is about."""
    if check.scope == "all" or evidence.head is None:
        return None
    newest = evidence.head.slot
    if check.summary == "checkpoint_health":
        return newest, newest
    epoch_column = next((c for c in ("epoch", "_epoch") if c in frame), None)
    if names and epoch_column is not None:
        epochs = frame.loc[frame[frame.columns[0]].isin(names), epoch_column]
        return int(epochs.min()), int(epochs.max())
    if check.summary == "release" and isinstance(evidence, Evidence):
        return evidence.events_since + 1, newest
    return evidence.recent_since + 1, newest


def _describe_observed(
    found: ExpectationValidationResult,
    frame: pd.DataFrame,
    check: Check,
    offenders: tuple[str, ...],
) -> str:
    if offenders:
        more = (
            f" and {len(offenders) - _OFFENDERS_SHOWN} more"
            if len(offenders) > _OFFENDERS_SHOWN
            else ""
        )
        return ", ".join(offenders[:_OFFENDERS_SHOWN]) + more
    if "observed_value" in found.result:
        return format_number(found.result["observed_value"])
    column = check.kwargs.get("column")
    values = frame[column].dropna() if column in frame else pd.Series(dtype="float64")
    distinct = sorted(set(values))
    if not distinct:
        return "nothing to check"
    numeric = pd.api.types.is_numeric_dtype(values)
    if len(distinct) <= (2 if numeric else _OFFENDERS_SHOWN):
        return ", ".join(format_number(v) for v in distinct)
    if not numeric:
        return f"{len(distinct)} different ones"
    return f"{format_number(distinct[0])} to {format_number(distinct[-1])}"


def format_number(value: Any) -> str:
    """Return a value as text for people; floats are rounded to four digits or to whole numbers."""
    if not isinstance(value, float):
        return str(value)
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


# The rows behind a summary: table -> the columns that a sample shows, and the column whose value is
# the first column of the summary (None: the summary is about the table as a whole).

_SAMPLE_COLUMNS: Mapping[str, tuple[str, ...]] = {
    LATE: (*ORIGIN, "_epoch", "output", "reason", "lateness_us"),
    DEAD_LETTERS: (*ORIGIN, "_epoch", "reason", "object"),
    REJECTIONS: ("row_id", "_epoch", "destination", "via", "reason"),
    BARRIERS: ("barrier_id", "_epoch", "outcome", "types", "missing", "tardy"),
    CHECKPOINTS: ("checkpoint_id", "_epoch"),
    EVENTS: (*ORIGIN, "_epoch", "position"),
}
_ROWS_BEHIND: Mapping[str, tuple[str, str | None]] = {
    "late_by_source": (LATE, "_source"),
    "late_by_output": (LATE, "output"),
    "late_by_reason": (LATE, "reason"),
    "stream_rejections": (REJECTIONS, "destination"),
    "barriers": (BARRIERS, "barrier_id"),
    "barrier_health": (BARRIERS, None),
    "barrier_members": (BARRIERS, None),
    "barrier_types": (BARRIERS, None),
    "checkpoints": (CHECKPOINTS, "checkpoint_id"),
    "checkpoint_health": (CHECKPOINTS, None),
    "dead_letters": (DEAD_LETTERS, "reason"),
    "dead_letter_health": (DEAD_LETTERS, None),
    "release": (EVENTS, None),
}


@dataclass(frozen=True)
class RowSample:
    """Rows behind a failed check.

    Attributes:
        rows: the newest, at most `SAMPLE_ROWS`; empty where rows were only counted.
        command: shows all of them. Where a check of a table has more than `_ROWS_NAMED` such rows,
            or the table has no `ORIGIN`, it shows all rows of their epochs; where rows were only
            counted, the counts.
    """

    rows: tuple[JsonObject, ...]
    command: str


def sample_rows(
    evidence: Evidence | JobEvidence, summary: str, names: Sequence[Any], *, recent: bool
) -> RowSample:
    """Return the newest rows behind some rows of a summary.

    Args:
        evidence: what the summary was computed from.
        summary: its name.
        names: first column of the rows that broke the check. Empty: rows behind the whole summary;
            of a table none.
        recent: only rows of recent epochs.
    """
    pipeline = evidence.spec.name
    if isinstance(evidence, JobEvidence):
        return RowSample((), f"tidegate status {pipeline}")
    if summary.startswith(TABLE_PREFIX):
        return _sample_table(evidence, summary.removeprefix(TABLE_PREFIX), names)
    if summary == "rules" and (rules := _list_quarantining(evidence, names)):
        return _show_newest(evidence, DEAD_LETTERS, _name_quarantined(rules), recent=recent)
    if summary not in _ROWS_BEHIND:
        return RowSample((), f"tidegate status {pipeline}")
    name, column = _ROWS_BEHIND[summary]
    if name == BARRIERS and column is None:
        unhealthy = _show_newest(evidence, name, ["outcome <> 'complete'"], recent=recent)
        if unhealthy.rows:
            return unhealthy
    chosen = []
    if column is not None and names:
        chosen.append(f"{column} in ({', '.join(map(_quote_sql, names))})")
    return _show_newest(evidence, name, chosen, recent=recent)


def _show_newest(
    evidence: Evidence, name: str, conditions: Sequence[str], *, recent: bool
) -> RowSample:
    """The newest rows of a table that meet conditions, which the command has as well."""
    epochs = [f"_epoch > {evidence.recent_since}"] if recent and evidence.recent_since else []
    if recent and evidence.is_older and evidence.head is not None:
        epochs.append(f"_epoch <= {evidence.head.slot}")
    where = " and ".join([*epochs, *conditions])
    table: pa.Table = getattr(evidence, name)
    table = select_rows(table, where) if where else table
    if name == EVENTS:  # those that share a position or an origin; a lost one has no row to show
        rows = table.select([*ORIGIN, "position"]).to_pandas()
        doubled = rows.duplicated([*ORIGIN], keep=False) | rows.duplicated("position", keep=False)
        table = table.filter(pa.array(doubled))
    shown = [c for c in _SAMPLE_COLUMNS[name] if c in table.column_names]
    newest = table.select(shown).sort_by([("_epoch", "descending")]).slice(0, SAMPLE_ROWS)
    option = f' --where "{where}"' if where else ""
    command = f"tidegate tables {evidence.spec.name} {name}{option}"
    return RowSample(tuple(newest.to_pylist()), command)


def _list_quarantining(evidence: Evidence, names: Sequence[Any]) -> list[tuple[str, str]]:
    """Source and rule of those broken rules whose rows are in the dead letters."""
    broken = [str(name).partition(".")[::2] for name in names]
    sources = evidence.spec.sources
    return [(s, rule) for s, rule in broken if sources[s].rules[rule].severity == "quarantine"]


def _name_quarantined(rules: Sequence[tuple[str, str]]) -> list[str]:
    """Conditions for rows that row rules quarantined; the detail of one begins with its rule."""
    either = " or ".join(
        f"_source = '{source}' and starts_with(detail, 'rule {rule}:')" for source, rule in rules
    )
    return [f"reason = '{RULE_QUARANTINED}'", f"({either})"]


def _sample_table(evidence: Evidence, name: str, names: Sequence[Any]) -> RowSample:
    table, wanted = evidence.tables[name], set(names)
    rows = zip(name_rows(table), table.to_pylist(), strict=True)
    chosen = [row for who, row in rows if who in wanted]
    shown = tuple({c: _make_plain(v) for c, v in row.items()} for row in chosen[-SAMPLE_ROWS:])
    condition = f"_epoch > {evidence.recent_since}"
    if chosen:
        epochs = [row["_epoch"] for row in chosen]
        condition = f"_epoch between {min(epochs)} and {max(epochs)}"
    if chosen and len(wanted) <= _ROWS_NAMED and {*ORIGIN} <= {*table.column_names}:
        origins = ", ".join(map(_quote_sql, sorted(wanted)))
        condition += f" and concat_ws('/', {', '.join(ORIGIN)}) in ({origins})"
    return RowSample(shown, f'tidegate tables {evidence.spec.name} {name} --where "{condition}"')


def _make_plain(value: Any) -> str | int | float | None:
    """The value as JSON holds it; NaN and infinities are text."""
    is_plain = value is None or isinstance(value, str | int)
    return value if is_plain or (isinstance(value, float) and isfinite(value)) else str(value)


def _quote_sql(value: Any) -> str:
    return str(value) if isinstance(value, int) else "'" + str(value).replace("'", "''") + "'"
