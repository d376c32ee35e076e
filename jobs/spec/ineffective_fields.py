"""Finds fields of a spec that are valid by themselves and would have no effect, or could not work.

Only files of specs are judged, not specs that a bucket has kept: what a running pipeline was
started with has to stay readable.
"""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Final

from pydantic import BaseModel

from .job_spec import JobSpec
from .operations import SupervisionSpec
from .pipeline import PipelineSpec
from .source_options import KafkaOptions, ParseOptions
from .source_spec import SourceSpec
from .variables import VARIABLE
from .window_specs import WindowKind, WindowSpec

Finding = tuple[tuple[int | str, ...], str]
"""Place of a field in the YAML, and what is wrong there."""

_CRON_PRESETS = ("@hourly", "@daily", "@weekly", "@monthly", "@quarterly", "@yearly")
# Where `${NAME}` is replaced by a variable of the driver's environment, so that no stored spec has
# the password of an address. Elsewhere the loader replaces it.
_REPLACED: Final = ("outputs.catalog", "sources.*.table.catalog", "sinks.*.url")
# Where `env:NAME` is.
_SECRETS: Final = (
    *("outputs.catalog_options.*", "sources.*.table.catalog_options.*", "sinks.*.options.*"),
    *("sources.*.kafka.options.*", "sources.*.kafka.registry_login", "sources.*.landing.options.*"),
)


def list_ineffective_fields(spec: PipelineSpec | JobSpec) -> list[Finding]:
    """Return the fields that would have no effect, each with what to write instead."""
    found = [*_list_bad_crons(spec), *_list_unreplaced_variables(spec)]
    if isinstance(spec, JobSpec):
        found += _list_job_fields(spec)
    else:
        found += _list_pipeline_fields(spec)
    return found


# Crons: Airflow reads them when it parses its DAGs, and one that is none breaks the whole file.


def find_cron_problem(text: str) -> str | None:
    """Return why Airflow cannot run something at these times; None if it can."""
    if text in _CRON_PRESETS:
        return None
    # Airflow's own parser. The import is late, because few specs have crons of their own.
    from croniter import CroniterBadCronError, CroniterBadDateError, croniter

    try:
        croniter(text).get_next()
    except CroniterBadDateError:
        return f"{text!r} is a time that never comes"
    except (CroniterBadCronError, ValueError, AttributeError, KeyError) as error:
        reason = str(error).removeprefix(f"[{text}] ")
        return (
            f"{text!r} is not a cron expression ({reason}); write minute, hour, day of the month,"
            f" month and day of the week, such as '0 6 * * *', or one of {', '.join(_CRON_PRESETS)}"
        )
    return None


def _list_bad_crons(spec: PipelineSpec | JobSpec) -> Iterator[Finding]:
    crons = {
        ("supervision", name): getattr(spec.supervision, name)
        for name in ("sweep", "maintain", "backfill")
    }
    if isinstance(spec, PipelineSpec):
        crons["splice", "offer_at"] = spec.splice.offer_at
    known = {*_list_default_crons(), None}
    for place, text in crons.items():
        if text not in known and (problem := find_cron_problem(text)) is not None:
            yield place, problem


def _list_default_crons() -> Iterator[str]:
    plain = SupervisionSpec()
    yield from (plain.sweep, plain.maintain)


# Variables of the environment


def is_replaced_later(model: type[BaseModel], place: tuple[int | str, ...]) -> bool:
    """Whether variables of a field are replaced by its driver, or not at all."""
    return model is PipelineSpec and _is_below(place, (*_REPLACED, *_SECRETS))


def _list_unreplaced_variables(spec: PipelineSpec | JobSpec) -> Iterator[Finding]:
    if not isinstance(spec, PipelineSpec):
        return
    for place, text in _iterate_texts(spec.model_dump(mode="json", by_alias=True), ()):
        found = VARIABLE.search(text) if _is_below(place, _SECRETS) else None
        if found is not None and found["name"]:
            advice = f"write env:{found['name']}, for the whole value"
            yield place, f"{found[0]} is not replaced here: {advice}"


def _iterate_texts(value: Any, place: tuple[int | str, ...]) -> Iterator[tuple[Any, str]]:
    if isinstance(value, str):
        yield place, value
    elif isinstance(value, Mapping):
        for name, part in value.items():
            yield from _iterate_texts(part, (*place, name))
    elif isinstance(value, list):
        for number, part in enumerate(value):
            yield from _iterate_texts(part, (*place, number))


def _is_below(place: tuple[int | str, ...], patterns: Iterable[str]) -> bool:
    """Whether a place is one of these, or below one of them; `*` is any name."""
    for pattern in patterns:
        parts = pattern.split(".")
        if len(place) >= len(parts) and all(
            part in ("*", str(own)) for part, own in zip(parts, place, strict=False)
        ):
            return True
    return False


# Options beside others that do not use them


def _list_job_fields(spec: JobSpec) -> Iterator[Finding]:
    checkpoint, plain = spec.checkpoint, type(spec.checkpoint)()
    for name in ("min_interval", "idle_interval", "idle_epochs"):
        if getattr(checkpoint, name) != getattr(plain, name):
            yield (
                ("checkpoint", name),
                "has no effect in a job: the triggers of its script set the pace",
            )
    for name in ("backfill", "announce"):
        if getattr(spec.supervision, name) is not None:
            yield ("supervision", name), "has no effect in a job: it is for windows of a pipeline"
    yield from _list_approval_fields(spec.supervision)


def _list_pipeline_fields(spec: PipelineSpec) -> Iterator[Finding]:
    for name, source in spec.sources.items():
        for place, message in _list_source_fields(source):
            yield ("sources", name, *place), message
    for name, window in spec.windows.items():
        for field in _list_session_fields(window):
            yield ("windows", name, field), f"has no effect: the window is {window.kind.value}"
    for name in () if spec.windows else ("backfill", "announce"):
        if getattr(spec.supervision, name) is not None:
            yield ("supervision", name), "has no effect without windows"
    yield from _list_approval_fields(spec.supervision)
    if spec.splice.offer_rows is None and spec.splice.offer_at != type(spec.splice)().offer_at:
        yield ("splice", "offer_at"), "has no effect without offer_rows"


def _list_approval_fields(supervision: SupervisionSpec) -> Iterator[Finding]:
    if supervision.approvers and not supervision.approval:
        yield ("supervision", "approvers"), "has no effect without approval: true"


def _list_session_fields(window: WindowSpec) -> Iterator[str]:
    if window.kind is not WindowKind.SESSION:
        plain = WindowSpec.model_fields
        for name in ("session_touch", "session_late", "session_close"):
            if getattr(window, name) != plain[name].default:
                yield name


def _list_source_fields(source: SourceSpec) -> Iterator[Finding]:
    if source.kafka is not None:
        yield from _list_topic_fields(source, source.kafka)
        return
    is_text = source.landing is None and source.format in ("json", "csv")
    plain = ParseOptions()
    for name in ParseOptions.model_fields:
        if getattr(source.parse, name) == getattr(plain, name):
            continue
        if not is_text:
            yield ("parse", name), f"has no effect on {source.format}, whose values have types"
        elif name != "timestamps" and source.format != "csv":
            yield ("parse", name), "has no effect on json"
    if not source.discovery.notifications and source.discovery.order == "keys":
        yield ("discovery", "notifications"), "has no effect without order: arrival"


def _list_topic_fields(source: SourceSpec, kafka: KafkaOptions) -> Iterator[Finding]:
    for name in ("path", "format", "partition_by", "discovery"):
        default = SourceSpec.model_fields[name].default
        if getattr(source, name) != default:
            yield (name,), "has no effect on a topic"
    for name in ("objects", "bytes"):
        if getattr(source.limits, name) is not None:
            yield ("limits", name), "has no effect on a topic: write rows"
    for name in ("delimiter", "quote", "header", "null"):
        if getattr(source.parse, name) != getattr(ParseOptions(), name):
            yield ("parse", name), "has no effect on a topic"
    yield from _list_payload_fields(kafka)


def _list_payload_fields(kafka: KafkaOptions) -> Iterator[Finding]:
    if kafka.payload == "json":
        if kafka.schema_id is not None:
            yield (
                ("kafka", "schema_id"),
                "has no effect on payload json: messages that begin with a schema's number, as a"
                " serializer of JSON Schema writes them, are dead letters",
            )
        if kafka.schema_file is not None:
            yield ("kafka", "schema_file"), "has no effect on payload json"
    if kafka.registry is None:
        if kafka.registry_login is not None:
            yield ("kafka", "registry_login"), "has no effect without registry"
        if kafka.on_unknown_schema != "dead_letter":
            yield ("kafka", "on_unknown_schema"), "has no effect without registry"
