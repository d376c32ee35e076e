"""The error classes of the driver, the command line and Airflow.

Every error that a person can see is a `TidegateError`; it says what happened, what was kept and
what to do next. Its class decides who acts: see `FailureClass`.
"""

import copyreg
import difflib
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import KW_ONLY, asdict, dataclass
from enum import StrEnum
from typing import Any, ClassVar, TypeVar

from tidegate.json_types import JsonObject, read_data_file
from tidegate.secret_masks import mask_text


class FailureClass(StrEnum):
    """Who has to act when something fails, and whether trying again can help."""

    # The environment failed: a server is away or a disk is full. The same step may succeed later.
    TRANSIENT = "transient"
    # Another driver took over. This one stops; nothing is wrong with the stream.
    FENCED = "fenced"
    # The pipeline's data or logic failed. Trying again meets the same row.
    POISON = "poison"
    # The user's spec, names or credentials are wrong.
    CONFIGURATION = "configuration"

    @property
    def exit_code(self) -> int:
        """The process exit code of a command that ends with this class."""
        return {"poison": 1, "configuration": 2, "transient": 3, "fenced": 4}[self.value]


@contextmanager
def exit_on_error() -> Iterator[None]:
    """Print an error of the block to stderr, and end the process with its class's exit code."""
    try:
        yield
    except TidegateError as error:
        sys.stderr.write(f"{error}\n")
        sys.exit(error.failure_class.exit_code)


def get_first_line(error: BaseException) -> str:
    r"""Return the first line of an error's text, at most 500 characters; its class without text.

    >>> get_first_line(OSError("no disk\nat all")), get_first_line(OSError())
    ('no disk', 'OSError')
    """
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:500]


def suggest_name(name: object, known: Iterable[str]) -> str:
    """Return the nearest of the known names as a question, or nothing if none is near.

    Most unknown names are typing errors.

    >>> suggest_name("amont", ["item", "amount"]), suggest_name("x", ["item"])
    (", did you mean 'amount'?", '')
    """
    close = difflib.get_close_matches(str(name), list(known), n=1)
    return f", did you mean {close[0]!r}?" if close else ""


@dataclass(eq=False, repr=False)
class TidegateError(Exception):
    """Base of all errors shown to people.

    Attributes:
        message: what happened, in one sentence, with the names involved.
        code: stable identifier, for example ``spec.unknown_field``.
        pipeline: the pipeline concerned, if any.
        kept: what was kept safe in spite of the failure.
        advice: what to do next, preferably a command.
        retry_after: seconds to wait before trying again, for transient failures.
        failure_class: who has to act, the same for all errors of a class.
    """

    failure_class: ClassVar[FailureClass] = FailureClass.POISON

    message: str
    _: KW_ONLY
    code: str
    pipeline: str | None = None
    kept: str | None = None
    advice: str | None = None
    retry_after: float | None = None

    def __post_init__(self) -> None:
        # Texts of other systems often repeat the address that was used, with its password.
        self.message = mask_text(self.message)
        self.advice = self.advice and mask_text(self.advice)

    def __str__(self) -> str:
        parts = [self.message]
        if self.kept:
            parts.append(f"Kept: {self.kept}")
        if self.advice:
            parts.append(f"Next: {self.advice}")
        return "\n".join(parts)

    def __reduce__(self) -> tuple[Any, ...]:
        # Errors cross process borders (Airflow, Spark); keyword-only arguments do not survive the
        # default reduction, which calls the class.
        new = copyreg.__newobj__  # type: ignore[attr-defined]  # not in typeshed
        return new, (type(self), self.message), self.__dict__

    def as_dict(self) -> JsonObject:
        """Return the JSON-ready form: ``error`` in status documents and in ``--json`` output."""
        return {"class": self.failure_class.value, **asdict(self)}


class TransientError(TidegateError):
    """The environment failed; the same step may succeed later.

    The driver and Airflow retry with back-off.
    """

    failure_class = FailureClass.TRANSIENT


class FencedError(TidegateError):
    """Another driver holds the lease or filled the slot.

    This process stops; the stream goes on elsewhere.
    """

    failure_class = FailureClass.FENCED


class PoisonError(TidegateError):
    """The pipeline's data or logic fails in the same way every time. A person has to act."""

    failure_class = FailureClass.POISON


class ConfigurationError(TidegateError):
    """The user's spec, names, credentials or version are wrong. A person has to act.

    Mostly nothing was started or changed, but credentials can also fail during a run.
    """

    failure_class = FailureClass.CONFIGURATION


Raised = TypeVar("Raised", bound=TidegateError)
"""The class that a call site expects; the entry's `error` has to be one of it."""


@dataclass(frozen=True)
class ErrorDefinition:
    """One entry of a folder's error catalogue (``errors.toml``): everything but the values.

    ``docs/errors.md`` is generated from these entries. A call makes the error, and the call site
    only passes the values::

        raise EXECUTORS_LOST(pipeline=spec.name, mark=mark) from error

    Attributes:
        code: stable identifier, for example ``spark.executors_lost``. Users and alerts match it.
        error: the class to raise; its failure class decides the exit code.
        message: what happened, as a format string over the fields of the call.
        kept: what was kept safe, a format string as well.
        advice: what to do next, a format string as well.
        retry_after: seconds to wait before trying again.
    """

    code: str
    error: type[TidegateError]
    message: str
    kept: str | None = None
    advice: str | None = None
    retry_after: float | None = None

    def __call__(self, *, pipeline: str | None = None, **fields: object) -> Raised:  # type: ignore[type-var]
        """Return the error with `fields` filled in; `pipeline` may be used in the texts too.

        Raises:
            KeyError: a text names a field that is not given.
        """
        values = {"pipeline": pipeline, **fields}
        return self.error(  # type: ignore[return-value]
            self.message.format(**values),
            code=self.code,
            pipeline=pipeline,
            kept=self.kept and self.kept.format(**values),
            advice=self.advice and self.advice.format(**values),
            retry_after=self.retry_after,
        )


def load_catalogue(module: str) -> Callable[[str], ErrorDefinition]:
    """Return the ``__getattr__`` of a folder's ``errors.py``: the entries of its ``errors.toml``.

    An entry names the class to raise: one of this module, or one that `module` defines above the
    call.
    """
    # The folder's own classes win over those of this module.
    classes = {**globals(), **vars(sys.modules[module])}
    catalogue = {
        name: ErrorDefinition(**{**entry, "error": classes[entry["error"]]})
        for name, entry in read_data_file(module.rpartition(".")[0], "errors.toml").items()
    }

    def find_entry(name: str) -> ErrorDefinition:
        """Return the entry with this name."""
        if name not in catalogue:
            raise AttributeError(f"module {module!r} has no attribute {name!r}")
        return catalogue[name]

    return find_entry
