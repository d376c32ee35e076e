"""Keys of a MinIO that a program hands out for a minute, as a site's own service would."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path

from tests.servers.minio import RealMinio
from tidegate.infra.minio_server import provision_bucket
from tidegate.infra.provision import Credentials

_PROGRAM = """\
import json, time

keys = json.load(open({keys!r}))
with open({log!r}, "a") as log:
    log.write(keys["AccessKeyId"] + "\\n")
expires = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(time.time() + 60))
print(json.dumps({{"Version": 1, **keys, "Expiration": expires}}))
"""


class ExpiringKeys:
    """A profile of AWS's configuration, whose keys are replaced by `rotate`.

    boto3 renews keys that are valid for less than ten minutes before each request.

    Args:
        folder: for the program and the profile.
        minio: gets a user for each pair of keys.
    """

    def __init__(self, folder: Path, minio: RealMinio) -> None:
        folder.mkdir()
        self._minio, self._keys, self._log = minio, folder / "keys.json", folder / "log"
        program = folder / "hand_out.py"
        program.write_text(_PROGRAM.format(keys=str(self._keys), log=str(self._log)))
        self._config = folder / "config"
        command = f"credential_process = {sys.executable} -S {program}"
        self._config.write_text(f"[profile executor]\n{command}\n")
        self.current = self._introduce()

    def environment(self) -> dict[str, str]:
        """Variables of an executor."""
        return {
            "AWS_CONFIG_FILE": str(self._config),
            "TIDEGATE_EXECUTOR_S3_PROFILE": "executor",
        }

    def rotate(self) -> None:
        """Hand out other keys from now on."""
        self.current = self._introduce()

    def revoke(self, keys: Credentials) -> None:
        """Let the server refuse keys that were handed out earlier."""
        refused = replace(keys, secret_key=Credentials.generate("new").secret_key)
        provision_bucket(self._minio.server, self._minio.bucket, refused)

    def was_handed_out(self, keys: Credentials) -> bool:
        """Whether a process has asked for keys and got these."""
        return self._log.exists() and keys.access_key in self._log.read_text().splitlines()

    def _introduce(self) -> Credentials:
        keys = Credentials.generate("executor")
        provision_bucket(self._minio.server, self._minio.bucket, keys)
        part = self._keys.with_suffix(".part")
        part.write_text(
            json.dumps({"AccessKeyId": keys.access_key, "SecretAccessKey": keys.secret_key})
        )
        part.rename(self._keys)
        return keys
