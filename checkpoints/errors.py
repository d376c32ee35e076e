"""Error catalogue of the bucket: stores, the log, checkpoints, the lease and requests."""

from tidegate.errors import (
    ConfigurationError,
    FencedError,
    PoisonError,
    TransientError,
    load_catalogue,
)


class NotFoundError(PoisonError):
    """There is no such object, and the store answers: definite evidence."""


class KeyRefusedError(PoisonError, ValueError):
    """No object of a store has this name, such as that of a file or object of another program."""


class PreconditionFailedError(TransientError):
    """A conditional write did not happen: another version or no object is there.

    Read again before deciding.
    """


class OutcomeUnknownError(TransientError):
    """A write has no answer: it may have happened, or may still happen. Read before acting."""


class StoreUnavailableError(TransientError):
    """The store cannot be reached or is busy. This says nothing about any object."""


class StoreDeniedError(ConfigurationError):
    """The bucket is missing, refuses the request or its credentials, or the clocks differ too much.

    This says nothing about any object.
    """


class SealUndecidedError(OutcomeUnknownError):
    """The store gave no answer within the budget; what fills the slot decides the attempt."""


class LeaseHeldError(FencedError):
    """Another process drives the pipeline and renews the lease, or the wait for it was ended."""


class LeaseLostError(FencedError):
    """This process held the lease and no longer does: it was taken, is gone, or was released."""


class HeadMovedError(TransientError):
    """An epoch was sealed, or a checkpoint restored, after the plan was made.

    Make a new plan, and get a new approval if there was one.
    """


__getattr__ = load_catalogue(__name__)
