"""Whose turn it is: when a driver may take the lease, and how one that may not yet waits for it.

Two things keep a driver away: another one that drives, and people who want that nobody does
(`desired.json`). One that stands by waits for the end of both and then drives; any other ends.
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
from tidegate.checkpoints.lease import Lease, LeaseHeldError
from tidegate.checkpoints.process_identity import ProcessIdentity
from tidegate.checkpoints.store import Store
from tidegate.errors import FencedError

_log = structlog.get_logger("tidegate.driver")

ALIVE_FILE = "alive"  # file in the work folder
_LOOK_EVERY = 2.0  # seconds between looks whether a stopped pipeline should run again


def touch_alive_file(alive: Path) -> None:
    """Show a supervisor that this process is not stuck.

    A liveness probe looks at the file's age.
    """
    with contextlib.suppress(OSError):
        alive.touch()


class LeaderElection:
    """The way to the lease.

    Attributes:
        stop: set when the process should end.
        patiently: waits out a store that is away.
        alive: the file to beat.
    """

    def __init__(
        self,
        store: Store,
        pipeline: str,
        stop: threading.Event,
        patiently: Retrying,
        *,
        standby: bool,
        alive: Path,
    ) -> None:
        self._store, self._pipeline, self._standby = store, pipeline, standby
        self.stop, self.patiently, self.alive = stop, patiently, alive
        self._heard = DesiredDocument()

    def clear_stop(self, who: str) -> None:
        """A person's own run ends an earlier stop.

        A restore goes first, and what nobody ever spoke of stays so.
        """
        now = self.patiently(read_desired_state, self._store, self._pipeline)
        if now.keeps_drivers_away and now.state is DesiredState.STOPPED:
            self.patiently(
                set_desired_state,
                self._store,
                self._pipeline,
                DesiredState.RUN,
                who=who,
                why="tidegate run",
            )

    def wait_until_wanted(self) -> bool:
        """Wait until the pipeline should run; False when asked to end.

        This comes before Spark: a stopped pipeline costs a request now and then, and no memory.

        Raises:
            FencedError: it should not run, and this driver does not stand by.
        """
        while not self.patiently(self._is_wanted):
            if self.stop.wait(_LOOK_EVERY):
                return False
        return True

    def acquire_lease(self, uid: str) -> Lease | None:
        """The lease, or None when a standby was asked to end.

        Raises:
            FencedError: another drives, or nobody should, and this driver does not stand by.
        """
        while True:
            try:
                lease = self._acquire_patiently(uid)
            except LeaseHeldError:
                if self._standby and self.stop.is_set():
                    return None
                raise
            # Who stops a pipeline says so first and looks for a driver then: that one has seen us,
            # or we see the wish here.
            with contextlib.ExitStack() as giving_back:
                giving_back.callback(lease.release)
                if self.patiently(self._is_wanted):
                    giving_back.pop_all()
                    return lease

    def _acquire_patiently(self, uid: str) -> Lease:
        return self.patiently(
            Lease.acquire,
            self._store,
            self._pipeline,
            ProcessIdentity.this_process(),
            uid=uid,
            standby=self._standby,
            stop=self._beat_and_check_stop,
            may=self._is_wanted,
        )

    def _beat_and_check_stop(self) -> bool:
        touch_alive_file(self.alive)
        return self.stop.is_set()

    def _is_wanted(self) -> bool:
        """Whether nobody keeps drivers away."""
        touch_alive_file(self.alive)
        before, self._heard = self._heard, read_desired_state(self._store, self._pipeline)
        if not self._heard.keeps_drivers_away:
            return True
        unwanted = _unwanted_error(self._pipeline, self._heard)
        if not self._standby:
            raise unwanted
        if before != self._heard:
            _log.info(
                "kept_waiting",
                pipeline=self._pipeline,
                why=unwanted.message,
                advice=unwanted.advice,
            )
        return False


def _unwanted_error(pipeline: str, wish: DesiredDocument) -> FencedError:
    said = f"{wish.who or 'nobody'}{f': {wish.why}' if wish.why else ''}"
    return FencedError(
        f"{pipeline} should be {wish.state} (said by {said})",
        code="driver.unwanted",
        pipeline=pipeline,
        kept="everything sealed; nothing was started",
        advice=f"when it should run again: tidegate start {pipeline}",
    )
