"""Who may order something over HTTP: the answers to requests without the right token."""

import json

from starlette.requests import Request

from services.runtime.access import refusal


def test_a_refusal_without_a_configured_token_names_both_settings() -> None:
    request = Request({"type": "http", "headers": []})
    answer = refusal(request, b"", section="bridge")
    assert answer is not None and answer.status_code == 403
    assert json.loads(bytes(answer.body))["error"].endswith(
        "none is configured: set bridge.token or bridge.token_file"
    )
