"""Refuses topics that cannot be read, before a pipeline starts."""

from collections.abc import Mapping
from importlib.util import find_spec

from tidegate.jobs.spec.pipeline import PipelineSpec
from tidegate.jobs.spec.source_options import (
    KafkaOptions,
    resolve_environment_value,
    resolve_environment_values,
)
from tidegate.secret_masks import is_secret_option

from .errors import KAFKA_LITERAL_SECRET
from .kafka_client import translate_settings


def require_readable_topics(spec: PipelineSpec, environment: Mapping[str, str] | None) -> None:
    """Refuse options of topics that cannot be used.

    Args:
        spec: the pipeline.
        environment: has the variables that the options name. None where the spec is only checked:
            then they need not be set, and the client need not be installed.

    Raises:
        ConfigurationError: a variable is not set, the client is not installed or has no such
            setting, or a plan of Spark Connect would show a secret.
    """
    for name, source in spec.sources.items():
        if source.kafka is None:
            continue
        for option, value in source.kafka.options.items():
            if spec.spark.uses_connect and is_secret_option(option, value):
                raise KAFKA_LITERAL_SECRET(source=name, option=option)
        if environment is not None:
            _require_settings(source.kafka, environment)
        elif find_spec("confluent_kafka") is not None:
            _require_names(source.kafka)


def _require_settings(kafka: KafkaOptions, environment: Mapping[str, str]) -> None:
    translate_settings(resolve_environment_values("kafka.options", kafka.options, environment))
    if kafka.registry_login is not None:
        resolve_environment_value("kafka.registry_login", kafka.registry_login, environment)


def _require_names(kafka: KafkaOptions) -> None:
    """Judge options whose values may be in an environment that is not this one."""
    options = dict(kafka.options)
    for name in ("ssl.truststore.type", "ssl.keystore.type"):
        if options.get(name, "").startswith("env:"):
            options[name] = "PEM"  # the variable may say so
    if options.get("sasl.jaas.config", "").startswith("env:"):
        del options["sasl.jaas.config"]
    translate_settings(options)
