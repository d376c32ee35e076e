"""Recognises secrets in names, addresses and texts, and masks them.

All places that show or store texts use these rules: errors, logs, the specs in the bucket, the
Streams page and support bundles. In doubt they mask too much: a name that only looks secret costs
a masked value, and one that is missed costs a secret.
"""

import re
from collections.abc import Iterable
from typing import Final

MASK: Final = "***"

SECRET_WORDS: Final = (
    r"(?:secret|password|passwd|passphrase|passcode|login|token|credential|private[\w.\-]?key"
    r"|api[\w.\-]?key|access[\w.\-]?key|account[\w.\-]?key|keystore[\w.\-]?key|jaas|fernet"
    r"|authorization|signature|user[\w.\-]?info|(?<![a-z])(?:pwd|sas)(?![a-z]))"
)
"""Words that make the name of an option or variable that of a secret, as a regular expression."""

# The end of a name that says something about a secret, and is none itself, such as
# `sasl.oauthbearer.token.endpoint.url` or `fs.s3a.aws.credentials.provider`.
_PLAIN_ENDINGS = r"(?:url|uri|endpoint|provider|mechanisms?|location|type|class|enabled|ms|seconds)"
_SECRET_NAME = re.compile(SECRET_WORDS, re.IGNORECASE)
_PLAIN_NAME = re.compile(rf"[._\-]{_PLAIN_ENDINGS}$", re.IGNORECASE)

# Endings of options that are known to hold no secret, such as `security.protocol`, `s3.region`
# or `spark.executor.memory`.
_KNOWN_OPTION = re.compile(
    r"(?:^|[._\-])(?:"
    + _PLAIN_ENDINGS
    + r"|acks|bytes|catalog|charset|codec|compression|cores|count|database|delimiter|encoding"
    r"|extensions|format|group|header|hosts?|id|impl|instances|interval|jars|level|master|max"
    r"|memory|min|mode|name|namespace|offsets|packages|partitions|path|policy|port|protocol"
    r"|provider|queue|records|region|repositories|retries|rows|schema|serializer|servers|size"
    r"|strategy|subscribe|table|threads|time|timeout|timezone|topics?|version|warehouse|zone)$",
    re.IGNORECASE,
)
# Spark's settings of these groups are about plans and resources.
_KNOWN_GROUPS = re.compile(r"spark\.(?:sql|shuffle|executor|memory|scheduler|task|python)\.")
# Options of users may be in these, or a command line may.
_OPEN_GROUPS = re.compile(r"catalog|env|javaoptions", re.IGNORECASE)
# A switch, a number or an amount says nothing that a secret could be.
_PLAIN_VALUE = re.compile(r"true|false|[+-]?\d{1,12}(?:\.\d+)?\s*[a-z]{0,3}", re.IGNORECASE)
# What a spec says about a variable of the environment is not the variable's value.
_REFERENCE = re.compile(r"env:|\$\{\w+\}")

# From the user's name to the last `@` before the path, because a password may hold an `@`.
_PASSWORD_IN_ADDRESS = re.compile(
    r"""((?::|%3A)//[^/@\s:"']*:)(?!\$\{\w+\}@)[^/\s"']+@""", re.IGNORECASE
)
# A parameter of an address, a part of a connection text, or an argument of a command.
_NAMED_PARAMETER = re.compile(
    rf"""((?:^|[?&;,\s"'\-])[\w.\-]*{SECRET_WORDS}[\w.\-]*=)(?!env:|\$\{{|\*\*\*)[^&;,\s"']+""",
    re.IGNORECASE,
)
_BEARER = re.compile(r"(\bbearer[\s+]+)(?!\*\*\*)[\w.~+/=\-]{6,}", re.IGNORECASE)
_PRIVATE_KEY = re.compile(
    r"-----BEGIN[A-Z +]*PRIVATE[ +]KEY-----.*?(?:-----END[A-Z +]*PRIVATE[ +]KEY-----|\Z)", re.DOTALL
)


_SHORTEST_HIDDEN = 6  # characters: a shorter value would mask words
_hidden: set[str] = set()  # values that this process has read as secrets


def mask_values(values: Iterable[str]) -> None:
    """Let `mask_text` mask these values from now on, in this process; short ones stay."""
    _hidden.update(value for value in values if len(value) >= _SHORTEST_HIDDEN)


def is_secret_name(name: str) -> bool:
    """Return whether an option or variable of this name holds a secret.

    >>> [is_secret_name(n) for n in ("sasl.password", "s3.session-token", "token.endpoint.url")]
    [True, True, False]
    """
    return _SECRET_NAME.search(name) is not None and _PLAIN_NAME.search(name) is None


def is_secret_option(name: str, value: str) -> bool:
    """Return whether an option of another system has to be masked.

    Those systems have more names of secrets than any list. So an option is masked unless its name,
    or the form of its value, is known to be harmless. A reference to the environment is harmless.

    >>> [is_secret_option(n, "x1") for n in ("security.protocol", "sasl.password", "acme.thing")]
    [False, True, True]
    """
    if _REFERENCE.match(value):
        return False
    if is_secret_name(name):
        return True
    if _KNOWN_GROUPS.match(name) and not _OPEN_GROUPS.search(name):
        return False
    return not (_KNOWN_OPTION.search(name) or _PLAIN_VALUE.fullmatch(value))


def mask_address(address: str) -> str:
    """Return an address with ``***`` for a password or key in it; ``${NAME}`` stays.

    A parameter with a secret's name counts as well.

    >>> mask_address("postgresql://me:hunter2@db/shop?sslpassword=x&a=1")
    'postgresql://me:***@db/shop?sslpassword=***&a=1'
    """
    masked = _PASSWORD_IN_ADDRESS.sub(rf"\1{MASK}@", address)
    return _NAMED_PARAMETER.sub(rf"\1{MASK}", masked)


def mask_text(text: str) -> str:
    """Return a text with ``***`` for what its form shows to be secret.

    These are passwords in addresses, parameters with a secret's name, bearer tokens and private
    keys, and what `mask_values` was given. Another secret that only its place would show stays.
    """
    for value in sorted(_hidden, key=len, reverse=True):
        text = text.replace(value, MASK)
    masked = _PRIVATE_KEY.sub(MASK, mask_address(text))
    return _BEARER.sub(rf"\1{MASK}", masked)


def mask_arguments(arguments: Iterable[str]) -> list[str]:
    """Return the arguments of a command with ``***`` for secrets.

    Secret is what `mask_text` masks, and what follows an option with a secret's name.

    >>> mask_arguments(["--password", "hunter2", "--day", "2026-01-01"])
    ['--password', '***', '--day', '2026-01-01']
    """
    masked: list[str] = []
    after_secret = False
    for argument in arguments:
        is_option = argument.startswith("-")
        hidden = after_secret and not is_option and not _REFERENCE.match(argument)
        masked.append(MASK if hidden else mask_text(argument))
        after_secret = is_option and "=" not in argument and is_secret_name(argument)
    return masked
