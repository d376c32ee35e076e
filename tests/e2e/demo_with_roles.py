"""``tidegate demo`` with the keys of the documented roles: drivers and Airflow get a driver's.

Only the feed may write the input, like the producers, who have keys of their own.
"""

from __future__ import annotations

import os
import sys

from tidegate.infra import demo
from tidegate.infra.minio_server import provision_bucket
from tidegate.infra.policies import Role, build_policy
from tidegate.infra.provision import Credentials, grant_policy
from tidegate.jobs.cli.main import main


class RoleDemo(demo.Demo):
    """The demo, after the stack's keys were limited to the role of a driver."""

    def _start_stream(self) -> None:
        server, bucket = self.stack.minio_server(), self.stack.settings.bucket
        names = ("TIDEGATE_S3_ACCESS_KEY", "TIDEGATE_S3_SECRET_KEY")
        own = Credentials(*(os.environ[name] for name in names))
        inputs = [source.path for source in self.spec.sources.values()]
        rights = build_policy(Role.DRIVER, bucket, self.spec.name, inputs=inputs)
        grant_policy(server.endpoint, server.root, bucket, own, rights, only=True)
        feeder = Credentials.generate("feeder")
        provision_bucket(server, bucket, feeder)
        # The feed inherits the environment; everything else was given its keys before.
        os.environ |= dict(zip(names, (feeder.access_key, feeder.secret_key), strict=True))
        super()._start_stream()
        os.environ |= dict(zip(names, (own.access_key, own.secret_key), strict=True))
        self.print_progress("the stack's keys have the role of a driver")


if __name__ == "__main__":
    demo.Demo = RoleDemo  # type: ignore[misc]
    sys.argv[1:1] = ["demo"]
    main()
