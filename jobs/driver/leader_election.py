"""When a driver may take the lease, and how a driver that may not yet waits for it.

Two things keep a driver away: another driver that holds the lease, and `desired.json`, where an
operator or a restore has stopped the pipeline. A standby waits until neither does; any other driver
ends with an error.
"""

from __future__ import annotations

import contextlib
import threading
from pathlib import Path

import structlog
from tenacity import Retrying

from tidegate.checkpoints.desired_state import (
    DesiredDocument,
    DesiredState,
    read_desired_state,
    set_desired_state,
)
from tidegate.checkpoints.lease import Lease, LeaseHeldError, LeaseWait
from tidegate.checkpoints.process_identity import ProcessIdentity
from tidegate.checkpoints.store import Store
from tidegate.errors import FencedError
from tidegate.jobs.driver.errors import UNWANTED

_log = structlog.get_logger("tidegate.driver")

ALIVE_FILE = "alive"  # file in the work folder
_LOOK_EVERY = 2.0  # seconds between two reads of the desired state of a stopped pipeline


def touch_alive_file(alive: Path) -> None:
    """Show a supervisor that this process is not stuck: a liveness probe reads the file's age."""
    with contextlib.suppress(OSError):
        alive.touch()


class LeaderElection:
    """Waits until this process may drive, and takes the lease.

    Args:
        store: the pipeline's store.
        pipeline: its name.
        stop: set when the process should end.
        retry: waits for a store that is away.
        standby: wait for the lease and for the desired state instead of ending with an error.
        alive: the file to touch while waiting.

    Attributes:
        stop: as given.
    """

    def __init__(
        self,
        store: Store,
        pipeline: str,
        stop: threading.Event,
        retry: Retrying,
        *,
        standby: bool,
        alive: Path,
    ) -> None:
        self._store, self._pipeline, self._standby = store, pipeline, standby
        self.stop, self._retry, self._alive = stop, retry, alive
        self._desired = DesiredDocument()

    def clear_stop(self, who: str) -> None:
        """Clear a previous ``tidegate stop``, because a person started this run.

        Does nothing during a restore, or if no desired state was ever recorded.
        """
        desired = self._retry(read_desired_state, self._store, self._pipeline)
        if desired.keeps_drivers_away and desired.state is DesiredState.STOPPED:
            self._retry(
                set_desired_state,
                self._store,
                self._pipeline,
                DesiredState.RUN,
                who=who,
                why="tidegate run",
            )

    def wait_until_wanted(self) -> bool:
        """Wait until the pipeline should run; return False if the process should end.

        Raises:
            FencedError: the pipeline should not run, and this driver is not a standby.
        """
        while not self._retry(self._is_wanted):
            if self.stop.wait(_LOOK_EVERY):
                return False
        return True

    def acquire_lease(self, uid: str) -> Lease | None:
        """Return the lease, or None if a standby should end.

        Raises:
            FencedError: another driver holds it, or the pipeline should not run, and this driver is
                not a standby.
        """
        while True:
            try:
                lease = self._acquire_with_retry(uid)
            except LeaseHeldError:
                if self._standby and self.stop.is_set():
                    return None
                raise
            # A person who stops the pipeline first writes the desired state and then looks for a
            # driver. So either they see this lease, or we see the new state here.
            with contextlib.ExitStack() as giving_back:
                giving_back.callback(lease.release)
                if self._retry(self._is_wanted):
                    giving_back.pop_all()
                    return lease

    def _acquire_with_retry(self, uid: str) -> Lease:
        return self._retry(
            Lease.acquire,
            self._store,
            self._pipeline,
            ProcessIdentity.this_process(),
            uid=uid,
            wait=LeaseWait(self._standby, self._touch_and_check_stop, self._is_wanted),
        )

    def _touch_and_check_stop(self) -> bool:
        touch_alive_file(self._alive)
        return self.stop.is_set()

    def _is_wanted(self) -> bool:
        touch_alive_file(self._alive)
        before, self._desired = self._desired, read_desired_state(self._store, self._pipeline)
        if not self._desired.keeps_drivers_away:
            return True
        error = _unwanted_error(self._pipeline, self._desired)
        if not self._standby:
            raise error
        if before != self._desired:
            _log.info(
                "kept_waiting", pipeline=self._pipeline, why=error.message, advice=error.advice
            )
        return False


def _unwanted_error(pipeline: str, desired: DesiredDocument) -> FencedError:
    who = f"{desired.who or 'nobody'}{f': {desired.why}' if desired.why else ''}"
    return UNWANTED(pipeline=pipeline, state=desired.state, who=who)
