"""The task of `<p>.deploy`: has drivers run the file of a spec, as `tidegate deploy` does."""

from pathlib import Path
from typing import Any

from tidegate.checkpoints.host_clock import SYSTEM_CLOCK
from tidegate.checkpoints.lease import read_lease
from tidegate.jobs.spec.git_commit import find_commit
from tidegate.jobs.spec.loader import load_any_spec
from tidegate.json_types import JsonObject

from .errors import DEPLOY_REFUSED, FILE_CHANGED
from .pipeline_operator import PipelineOperator, get_requester

_DEPLOYED_WITHIN = 300.0  # seconds for the first round of a driver with the new spec


class DeployOperator(PipelineOperator):
    """Shows in its log what differs and the plan, and deploys the file unless the plan refuses it.

    A file that a driver is trying already is only waited for.

    Args:
        reason: kept with the deploy.
        digest: of the file whose plan a person has seen; empty for whatever the file holds.
    """

    ui_color = "#e3dcf0"
    template_fields = ("reason", "digest")
    reason: str
    digest: str

    def execute(self, context: Any) -> JsonObject:
        """Deploy, and wait for the first round of a driver; what was done is the task's result.

        Raises:
            ConfigurationError: the spec is wrong, the plan refuses it, the file is another one than
                the person saw, or its deploy has failed.
            TransientError: no driver has begun with it in time; the next one does.
        """
        # Imported here, because every parse of the DAGs would pay for the rules of changes.
        from tidegate.checkpoints.deploy_requests import (
            await_deploy,
            propose_deploy,
            request_deploy,
        )
        from tidegate.checkpoints.deployed_specs import read_deployed
        from tidegate.jobs.spec.user_code import collect_code

        spec = load_any_spec(Path(self.spec))
        store = self.resolve_access().open()
        proposal = propose_deploy(store, spec, collect_code(spec, Path(self.spec)))
        if proposal is None:
            return self._report("nothing is deployed yet; the first driver runs the file")
        digest = proposal.copy.digest
        if self.digest not in ("", digest):
            raise FILE_CHANGED(pipeline=self.pipeline, file=self.spec)
        for line in [*map(str, proposal.changes), *proposal.plan_lines]:
            self.log.info("%s", line)
        if proposal.is_refused:
            raise DEPLOY_REFUSED(pipeline=self.pipeline, plan="; ".join(proposal.plan_lines))
        if proposal.changes:
            who = get_requester(context)
            commit = find_commit(Path(self.spec))
            request_deploy(
                store, self.pipeline, proposal.copy, who=who, why=self.reason, commit=commit
            )
        elif read_deployed(store, self.pipeline).trying is None:
            return self._report("nothing differs from the deployed spec")
        lease = read_lease(store, self.pipeline)
        if lease is None or lease.is_free:
            return self._report("no driver runs; the next one begins with the new spec")
        await_deploy(store, self.pipeline, digest, _DEPLOYED_WITHIN, SYSTEM_CLOCK)
        return self._report("deployed")

    def _report(self, said: str) -> JsonObject:
        self.log.info("%s: %s", self.pipeline, said)
        return {"pipeline": self.pipeline, "said": said}
