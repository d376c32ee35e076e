"""Every error of the local stack, the demo and its feed; see `tidegate.errors.ErrorDefinition`.

Not here is `airflow_api.AirflowApiError`, whose code carries the HTTP status.
"""

from __future__ import annotations

from tidegate.errors import ConfigurationError, ErrorDefinition, PoisonError, TransientError

NO_DAGS_FOLDER = ErrorDefinition(
    "infra.dags",
    ConfigurationError,
    "no DAGs folder at {folder}",
    advice="run in the project's folder, or name one",
)
STACK_NEVER_UP = ErrorDefinition(
    "infra.not_up",
    ConfigurationError,
    "the stack in {home} was never up",
    advice="tidegate up",
)
STACK_FILE_DAMAGED = ErrorDefinition(
    "infra.stack_file",
    ConfigurationError,
    "{file} cannot be read as a file of a tidegate stack: {cause}",
    advice="choose another folder for the stack, or remove {folder}",
)
AIRFLOW_AWAY = ErrorDefinition(
    "infra.airflow_away", TransientError, "Airflow does not answer at {url}: {error}"
)
AIRFLOW_WAIT_ENDED = ErrorDefinition(
    "infra.airflow_wait", TransientError, "after {seconds:.0f} s: {complaint}"
)
AIRFLOW_NOT_STARTED = ErrorDefinition(
    "infra.airflow_start",
    TransientError,
    "{what}",
    advice="read {log}; then `tidegate down` and `tidegate up`",
)
MINIO_NOT_STARTED = ErrorDefinition(
    "infra.minio_start", TransientError, "MinIO {what} on {endpoint}", advice="read {log}"
)
MINIO_NOT_BUILT = ErrorDefinition(
    "infra.minio_build",
    TransientError,
    "{what}",
    advice="read {log}, then run the same command again; or put a `minio` program on PATH",
)
MINIO_AWAY = ErrorDefinition(
    "infra.minio_away",
    TransientError,
    "no answer from {endpoint}: {error}",
    advice="run it again",
)
MINIO_REFUSED = ErrorDefinition(
    "infra.minio_refused", ConfigurationError, "{endpoint} refused: {error}"
)
VARIABLES_MISSING = ErrorDefinition(
    "infra.variables",
    ConfigurationError,
    "not set: {names}",
    advice="set them, then run it again",
)
STORE_NOT_A_BUCKET = ErrorDefinition(
    "infra.variables", ConfigurationError, "TIDEGATE_STORE is {store!r}, not s3://bucket"
)
POLICY_UNREADABLE = ErrorDefinition(
    "infra.policy", ConfigurationError, "{file} does not hold a policy: {error}"
)
LANDER_WITHOUT_INPUT = ErrorDefinition(
    "infra.no_input",
    ConfigurationError,
    "a lander needs a folder to land in",
    advice="name the source's: --input inbox/ticks/",
)
FEED_EMPTY = ErrorDefinition(
    "feed.empty",
    ConfigurationError,
    "no flights in {days} day(s) from {start}",
    advice="choose days of the year 2013",
)
FEED_NOT_INSTALLED = ErrorDefinition(
    "feed.no_data",
    ConfigurationError,
    "the flights data is not installed",
    advice="pip install 'tidegate[demo]'",
)
DEMO_IMPORT_ERRORS = ErrorDefinition(
    "demo.import_errors", PoisonError, "Airflow could not import: {errors}"
)
DEMO_RECOVER_FAILED = ErrorDefinition(
    "demo.recover_failed", PoisonError, "{dag_id} ended as {state}"
)
DEMO_NOTHING_SEALED = ErrorDefinition(
    "demo.nothing_sealed", TransientError, "nothing is sealed yet"
)
DEMO_TIMEOUT = ErrorDefinition(
    "demo.timeout",
    TransientError,
    "waited {seconds:.0f} s for {what}",
    advice="the logs are in {home}/logs and {home}/drivers",
)
