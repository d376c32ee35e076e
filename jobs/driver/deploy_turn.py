"""One driver's part in a deploy: begin with a copy, confirm it, or go back to the copy before."""

from contextlib import suppress
from dataclasses import dataclass, field

import structlog

from tidegate.checkpoints.deployed_specs import (
    Deploy,
    SpecCopy,
    confirm_deploy,
    count_attempt,
    note_failed_deploy,
    write_copy,
)
from tidegate.checkpoints.store import Store
from tidegate.errors import FencedError, TidegateError, TransientError

from .errors import DEPLOY_FAILED, OTHER_DEPLOYED

_log = structlog.get_logger("tidegate.driver")


@dataclass
class DeployTurn:
    """The copy that one driver runs.

    Attributes:
        pipeline: its name.
        copy: the spec and its code.
        deploy: the copy's name, and who deployed it.
        replaces: a person runs the file, which counts whatever else is deployed.
    """

    pipeline: str
    copy: SpecCopy
    deploy: Deploy
    replaces: bool = False
    _is_trial: bool = field(default=False, init=False)
    _is_confirmed: bool = field(default=False, init=False)

    def begin(self, store: Store) -> None:
        """Begin, once the lease is held.

        Raises:
            FencedError: another copy was deployed since this process started, so the next process
                has to drive.
        """
        digest = self.deploy.digest
        deployed = count_attempt(store, self.pipeline, digest)
        wanted = deployed.wanted
        if wanted is not None and wanted.digest != digest and not self.replaces:
            raise OTHER_DEPLOYED(pipeline=self.pipeline, who=wanted.who)
        self._is_trial = deployed.trying is not None and deployed.trying.digest == digest
        self._is_confirmed = wanted is not None and wanted == deployed.current == self.deploy

    def confirm(self, store: Store) -> None:
        """Note, once, that the first round has ended: from now on drivers run this copy."""
        if self._is_confirmed:
            return
        write_copy(store, self.pipeline, self.copy)
        confirm_deploy(store, self.pipeline, self.deploy, replaces=self.replaces)
        self._is_confirmed = True
        _log.info("deployed", pipeline=self.pipeline, who=self.deploy.who, why=self.deploy.why)

    def judge_failure(self, store: Store, error: TidegateError) -> TidegateError:
        """Return the error with which the driver ends.

        A copy that is tried has failed, unless the error passes or another driver took over. Then
        the next driver runs the copy before.
        """
        if self._is_confirmed or not self._is_trial:
            return error
        if isinstance(error, TransientError | FencedError):
            return error
        with suppress(TidegateError):
            note_failed_deploy(store, self.pipeline, self.deploy.digest, error)
            self._is_trial = False
            failed: TidegateError = DEPLOY_FAILED(
                pipeline=self.pipeline, who=self.deploy.who, error=error.message
            )
            return failed
        return error
