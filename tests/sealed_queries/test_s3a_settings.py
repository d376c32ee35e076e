"""Hadoop's S3A gets what reaches the bucket of a job's checkpoints."""

from __future__ import annotations

from tidegate.checkpoints.s3_store import S3Settings
from tidegate.jobs.sealed_queries.s3a_settings import build_s3a_settings


def test_s3a_gets_the_settings_of_the_store() -> None:
    """Endpoint, region and keys; without keys S3A looks for them itself."""
    given = S3Settings(bucket="b", endpoint="https://minio.example.org", region="eu-west-1")
    without = build_s3a_settings(given)
    assert "fs.s3a.access.key" not in without
    # Of the SDK: it reads profiles and tokens of a web identity too.
    assert without["fs.s3a.aws.credentials.provider"].endswith(".DefaultCredentialsProvider")
    found = build_s3a_settings(
        S3Settings.model_validate({**given.model_dump(), "access_key": "who", "secret_key": "what"})
    )
    assert found["fs.s3a.endpoint"] == "https://minio.example.org"
    assert found["fs.s3a.connection.ssl.enabled"] == "true"
    assert (found["fs.s3a.access.key"], found["fs.s3a.secret.key"]) == ("who", "what")


def test_s3a_gets_a_session_token() -> None:
    """Then another provider takes the keys."""
    found = build_s3a_settings(
        S3Settings.from_environment(
            "b",
            environment={
                f"TIDEGATE_S3_{name}": name
                for name in ("ACCESS_KEY", "SECRET_KEY", "SESSION_TOKEN")
            },
        )
    )
    assert found["fs.s3a.session.token"] == "SESSION_TOKEN"
    assert found["fs.s3a.aws.credentials.provider"].endswith(".TemporaryAWSCredentialsProvider")
