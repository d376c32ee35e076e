"""Error catalogue of streams, pipes and reducers."""

from __future__ import annotations

from tidegate.errors import ConfigurationError, ErrorDefinition, PoisonError, TransientError

_SEALED = "everything sealed so far"
_NOT_STARTED = "nothing was started or changed"

ROWS_INCOMPLETE = ErrorDefinition(
    "streams.incomplete",
    TransientError,
    "{name}: {stream} should hold rows {start} to {end}, and {rows} of them were found",
    kept=_SEALED,
    advice="the epoch is planned again by itself; if this stays, look at the tables: tidegate"
    " checkpoints verify",
)


class RowsRetiredError(PoisonError):
    """Rows that an attachment needs are in no epoch and in no table any more."""


ROWS_RETIRED = ErrorDefinition(
    "streams.retired",
    RowsRetiredError,
    "row {row} of {stream} lies in an epoch that was retired, and no table has it",
    kept=_SEALED,
    advice="restore a checkpoint that is not behind this row (tidegate checkpoints list), or let"
    " the pipe or reducer go: tidegate detach",
)
BAD_PREDICATE = ErrorDefinition(
    "pipe.bad_predicate",
    ConfigurationError,
    "pipes.{pipe}: {cause}",
    kept=_NOT_STARTED,
    advice="'where' is SQL over {columns}, 'keys' values of the columns' types",
)
BAD_EXPRESSION = ErrorDefinition(
    "reducer.bad_expression",
    ConfigurationError,
    "reducers.{reducer}.aggregates: {cause}",
    kept=_NOT_STARTED,
    advice="expressions are SQL over {columns}",
)
REDUCER_NOT_FOUND = ErrorDefinition(
    "reducer.not_found",
    ConfigurationError,
    "no reducer at {path}: {cause}",
    kept=_SEALED,
    advice="install its package where the driver runs, or correct the path",
)
REDUCER_NOT_CALLABLE = ErrorDefinition(
    "reducer.not_found", ConfigurationError, "{path} is not a function"
)
