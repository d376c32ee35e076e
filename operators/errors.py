"""Every error that Airflow's side of tidegate raises; see `tidegate.errors.ErrorDefinition`.

Not here are errors whose class depends on the case: what a driver or a child process reported
itself (`child_processes.rebuild_error`), ``driver.exit_N``, and ``recover.unfit`` for a store that
does not answer (`recover_and_pin.choose_checkpoint`).
"""

from tidegate.errors import PoisonError, TransientError, load_catalogue


class DriverLostError(TransientError):
    """The driver vanished several times in a row without a new checkpoint.

    Airflow tries again, with its own back-off.
    """


class QualityFailedError(PoisonError):
    """Expectations failed: the stream goes on, and a person has to look.

    Trying again would find the same rows.
    """


__getattr__ = load_catalogue(__name__)
