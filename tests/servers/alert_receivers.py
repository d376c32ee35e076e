"""Slack, PagerDuty and Alertmanager as one local server that judges what it gets.

The schemas are written after what the providers publish: Slack's page on incoming webhooks,
PagerDuty's `reference/events-v2/openapiv3.json` (api-schema), and Alertmanager's
`api/v2/openapi.yaml`. Fields that they do not name are refused too, so that a typing error fails.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from jsonschema import Draft202012Validator

_TEXT = {"type": "string", "minLength": 1}
_TEXTS = {"type": "object", "additionalProperties": {"type": "string"}}
# RFC 3339; an instant without a zone is refused.
_INSTANT = {
    "type": "string",
    "pattern": r"^\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(\.\d+)?(Z|[+-]\d\d:\d\d)$",
}
_PAGE = {"type": "string", "pattern": "^https?://"}


def _make_object(required: Sequence[str], **properties: Any) -> dict[str, Any]:
    return {
        "type": "object",
        "required": list(required),
        "properties": properties,
        "additionalProperties": False,
    }


_PAGERDUTY_PAYLOAD = _make_object(
    ["summary", "severity", "source"],
    summary={"type": "string", "minLength": 1, "maxLength": 1024},
    severity={"enum": ["critical", "warning", "error", "info"]},
    source=_TEXT,
    timestamp=_INSTANT,
    component={"type": "string"},
    group={"type": "string"},
    custom_details={"type": "object"},
    **{"class": {"type": "string"}},
)
_PAGERDUTY = _make_object(
    ["routing_key", "event_action"],
    routing_key={"type": "string", "pattern": "^[0-9a-zA-Z]{32}$"},
    event_action={"enum": ["trigger", "acknowledge", "resolve"]},
    dedup_key={"type": "string", "maxLength": 255},
    payload=_PAGERDUTY_PAYLOAD,
    client={"type": "string"},
    client_url=_PAGE,
) | {
    "if": {"properties": {"event_action": {"const": "trigger"}}},
    "then": {"required": ["payload"]},
    "else": {"required": ["dedup_key"]},
}
_ALERTMANAGER = _make_object(
    ["labels"],
    labels=_TEXTS | {"minProperties": 1},
    annotations=_TEXTS,
    startsAt=_INSTANT,
    endsAt=_INSTANT,
    generatorURL=_PAGE,
)
# Path -> schema, and the answer to what fits.
_RECEIVERS: dict[str, tuple[dict[str, Any], int]] = {
    "/services/T0/B0/hush": (_make_object(["text"], text=_TEXT), 200),
    "/v2/enqueue": (_PAGERDUTY, 202),
    "/api/v2/alerts": ({"type": "array", "items": _ALERTMANAGER}, 200),
}
ROUTING_KEY = "0123456789abcdef0123456789abcdef"


class AlertReceivers:
    """What came so far.

    Attributes:
        url: of the server.
        taken: path and body of each request that fits its schema.
        refused: what is wrong with the others.
        answers: codes of the next answers, whatever comes; then requests are judged again.
    """

    def __init__(self, url: str) -> None:
        self.url = url
        self.taken: list[tuple[str, Any]] = []
        self.refused: list[str] = []
        self.answers: list[int] = []

    @property
    def environment(self) -> dict[str, str]:
        """The variables that the specs of tests name."""
        return {
            "SLACK_WEBHOOK_URL": f"{self.url}/services/T0/B0/hush",
            "PAGERDUTY_KEY": ROUTING_KEY,
            "ALERTMANAGER_URL": self.url,
        }

    def judge(self, path: str, kind: str, data: bytes) -> int:
        """Note a request, and return the code of its answer."""
        if self.answers:
            return self.answers.pop(0)
        schema, code = _RECEIVERS.get(path, (None, 404))
        try:
            body = json.loads(data)
        except ValueError as error:
            self.refused.append(f"{path}: {error}")
            return 400
        faults = [] if schema is None else [*Draft202012Validator(schema).iter_errors(body)]
        if schema is None or faults or kind != "application/json":
            self.refused.append(f"{path} ({kind}): {[fault.message for fault in faults]}")
            return code if schema is None else 400
        self.taken.append((path, body))
        return code


@contextmanager
def running() -> Iterator[AlertReceivers]:
    """The server, on a free port."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            data = self.rfile.read(int(self.headers["Content-Length"]))
            code = receivers.judge(self.path, self.headers["Content-Type"], data)
            self.send_response(code)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        receivers = AlertReceivers(f"http://127.0.0.1:{server.server_port}")
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        try:
            yield receivers
        finally:
            server.shutdown()
            thread.join()
