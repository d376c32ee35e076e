"""Protobuf messages in Spark's Python workers, for Spark SQL."""

from collections.abc import Callable, Sequence
from typing import Any

import pandas as pd
from pyspark.sql.pandas.functions import pandas_udf

from tidegate.jobs.rows.protobuf_texts import decode_to_texts, load_message_class

_FAULT_COLUMN = "_bad"


def make_payload_reader(
    schema: bytes, message: str, names: Sequence[str], index: bytes | None
) -> Callable[..., Any]:
    """A function of Spark's: bytes -> a struct of texts, with ``_bad`` saying what is wrong.

    If ``_bad`` is not null, all texts are null. See `decode_to_texts`.

    Args:
        schema: a descriptor set.
        message: full name of the message.
        names: fields to take; those the message has not are null.
        index: bytes that must precede the payload, and are taken off; None: none do.

    Raises:
        ConfigurationError: the schema cannot be used, or has no such message.
    """
    load_message_class(schema, message)  # so that a mistake is reported before Spark wraps it
    kind = ", ".join(f"`{name}` string" for name in [*names, _FAULT_COLUMN])

    def read_payloads(values: pd.Series) -> pd.DataFrame:
        """Decode one batch, in a Python worker of Spark's."""
        return pd.DataFrame(
            decode_to_texts(schema, message, names, index, values), columns=[*names, _FAULT_COLUMN]
        )

    # Spark looks at the types; with postponed evaluation they would be their names.
    read_payloads.__annotations__ = {"values": pd.Series, "return": pd.DataFrame}
    found: Callable[..., Any] = pandas_udf(read_payloads, kind)  # type: ignore[call-overload]
    return found
