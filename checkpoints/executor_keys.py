"""Keys of the store that the hosts of Spark's executors have of their own.

They are in the environment of an executor, where tasks take them before those of the driver. The
driver then sends none of its keys along. Keys that expire are those of a profile in AWS's
configuration files: boto3 renews them by the process, role or web identity that it names.
"""

from collections.abc import Mapping

_KEYS = ("ACCESS_KEY", "SECRET_KEY", "SESSION_TOKEN", "PROFILE")
_DRIVER, _EXECUTOR = "TIDEGATE_S3_", "TIDEGATE_EXECUTOR_S3_"
EXECUTOR_VARIABLES = tuple(_EXECUTOR + key for key in _KEYS)
"""The variables that hold them."""
_PLACES = frozenset(
    {
        "TIDEGATE_S3_ENDPOINT",
        "TIDEGATE_S3_REGION",
        "AWS_CA_BUNDLE",
        "AWS_DEFAULT_REGION",
        "AWS_ENDPOINT_URL_S3",
        "AWS_REGION",
    }
)


def has_executor_keys(environment: Mapping[str, str]) -> bool:
    """Whether this is the environment of an executor with keys of its own."""
    return any(environment.get(name) for name in EXECUTOR_VARIABLES)


def choose_task_keys(environment: Mapping[str, str]) -> Mapping[str, str]:
    """Return the environment with which a task opens stores.

    >>> given = {"TIDEGATE_S3_ACCESS_KEY": "driver", "TIDEGATE_EXECUTOR_S3_ACCESS_KEY": "narrow"}
    >>> choose_task_keys(given)["TIDEGATE_S3_ACCESS_KEY"]
    'narrow'
    """
    if not has_executor_keys(environment):
        return environment
    own = {_DRIVER + key: environment.get(_EXECUTOR + key, "") for key in _KEYS}
    return {**environment, **own}


def select_driver_variables(environment: Mapping[str, str], *, with_keys: bool) -> dict[str, str]:
    """Return what a driver sends to its tasks so that they can open its store."""
    if not with_keys:
        return {name: text for name, text in environment.items() if name in _PLACES}
    return {name: text for name, text in environment.items() if name.startswith((_DRIVER, "AWS_"))}
