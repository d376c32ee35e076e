"""Refuses topics that cannot be read, before a pipeline starts."""

from collections.abc import Mapping
from importlib.util import find_spec

from tidegate.jobs.spec.operations import KafkaSinkSpec
from tidegate.jobs.spec.pipeline import PipelineSpec
from tidegate.jobs.spec.source_options import (
    resolve_environment_value,
    resolve_environment_values,
)
from tidegate.secret_masks import is_secret_option, mask_address

from .errors import KAFKA_LITERAL_SECRET
from .kafka_client import translate_settings


def require_readable_topics(spec: PipelineSpec, environment: Mapping[str, str] | None) -> None:
    """Refuse options of topics, of sources and of sinks, that cannot be used.

    Args:
        spec: the pipeline.
        environment: has the variables that the options name. None where the spec is only checked:
            then they need not be set, and the client need not be installed.

    Raises:
        ConfigurationError: a variable is not set, the client is not installed or has no such
            setting, or a plan of Spark Connect would show a secret.
    """
    topics = {name: source.kafka for name, source in spec.sources.items() if source.kafka}
    given = {f"sources.{name}.kafka.options": kafka.options for name, kafka in topics.items()}
    for name, sink in spec.sinks.items():
        if isinstance(sink, KafkaSinkSpec):
            given[f"sinks.{name}.options"] = sink.options
    if spec.spark.uses_connect:
        _require_no_secrets(spec, given)
    for field, options in given.items():
        if environment is not None:
            translate_settings(resolve_environment_values(field, options, environment))
        elif find_spec("confluent_kafka") is not None:
            _require_names(options)
    for name, kafka in topics.items() if environment is not None else ():
        if kafka.registry_login is not None:
            field = f"sources.{name}.kafka.registry_login"
            resolve_environment_value(field, kafka.registry_login, environment or {})


def _require_no_secrets(spec: PipelineSpec, given: Mapping[str, Mapping[str, str]]) -> None:
    for field, options in given.items():
        for option, value in options.items():
            if is_secret_option(option, value):
                raise KAFKA_LITERAL_SECRET(what=f"{field}.{option}")
    for name, sink in spec.sinks.items():
        for field, address in sink.addresses.items():
            if mask_address(address) != address:
                raise KAFKA_LITERAL_SECRET(what=f"sinks.{name}.{field}")


def _require_names(given: Mapping[str, str]) -> None:
    """Judge options whose values may be in an environment that is not this one."""
    options = dict(given)
    for name in ("ssl.truststore.type", "ssl.keystore.type"):
        if options.get(name, "").startswith("env:"):
            options[name] = "PEM"  # the variable may say so
    if options.get("sasl.jaas.config", "").startswith("env:"):
        del options["sasl.jaas.config"]
    translate_settings(options)
