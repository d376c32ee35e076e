"""The settings with which Hadoop's S3A reaches the bucket of a job's checkpoints."""

from tidegate.checkpoints.s3_store import S3Settings

_PROVIDER = "fs.s3a.aws.credentials.provider"
# Of the SDK: S3A's own default reads neither profiles nor tokens of a web identity.
_DEFAULT_PROVIDER = "software.amazon.awssdk.auth.credentials.DefaultCredentialsProvider"
_KEYS_PROVIDER = "org.apache.hadoop.fs.s3a.SimpleAWSCredentialsProvider"
_TOKEN_PROVIDER = "org.apache.hadoop.fs.s3a.TemporaryAWSCredentialsProvider"


def build_s3a_settings(settings: S3Settings) -> dict[str, str]:
    """The settings of a session with which Hadoop's S3A reaches the store's bucket.

    Without keys S3A looks where boto3 does: in the environment, for a web identity, in profiles,
    and for the role of a container or instance.
    """
    found = {"fs.s3a.endpoint.region": settings.region, "fs.s3a.path.style.access": "true"}
    if settings.endpoint:
        secure = str(settings.endpoint.startswith("https://")).lower()
        found |= {"fs.s3a.endpoint": settings.endpoint, "fs.s3a.connection.ssl.enabled": secure}
    access_key, secret_key, session_token = settings.reveal_keys()
    if not (access_key and secret_key):
        return {**found, _PROVIDER: _DEFAULT_PROVIDER}
    found |= {"fs.s3a.access.key": access_key, "fs.s3a.secret.key": secret_key}
    if not session_token:
        return {**found, _PROVIDER: _KEYS_PROVIDER}
    return {**found, "fs.s3a.session.token": session_token, _PROVIDER: _TOKEN_PROVIDER}
