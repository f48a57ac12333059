"""Authorization of HTTP orders: the bearer token of the settings.

Without a token in the settings nobody may. Source: RFC 6750.
"""

import base64
import hmac
from pathlib import Path
from typing import TYPE_CHECKING

from pydantic import SecretStr

from schemas.errors import SettingsError

if TYPE_CHECKING:
    from starlette.requests import Request
    from starlette.responses import Response

_CHARACTERS_MIN = 16


def read_token(token: SecretStr | None, file: Path | None, *, section: str) -> bytes:
    """Return the token, b"" where the settings have none.

    Raise SettingsError, which names the key.
    """
    if token is not None and file is not None:
        raise _wrong("token and token_file are both set", f"{section}.token", "remove one of them")
    if file is not None:
        key = f"{section}.token_file"
        try:
            text = file.read_text(encoding="utf-8").strip()
        except (OSError, UnicodeDecodeError) as error:
            reason = error.strerror if isinstance(error, OSError) else "the file is not text"
            raise _wrong(f"can't read {file}: {reason}", key, f"correct {key}") from None
    elif token is not None:
        key, text = f"{section}.token", token.get_secret_value()
    else:
        return b""
    if len(text) < _CHARACTERS_MIN or not text.isascii() or not text.isprintable():
        raise _wrong(
            f"a token has at least {_CHARACTERS_MIN} printable ASCII characters",
            key,
            "make one: openssl rand -hex 32",
        )
    return text.encode()


def refusal(
    request: "Request", token: bytes, *, section: str, basic: bool = False
) -> "Response | None":
    """Return the answer to a request without the right, None for a request that is allowed.

    With `basic` the token may also be the password of HTTP Basic, which browsers ask for.
    """
    from starlette.responses import JSONResponse

    if not token:
        text = (
            f"this request needs a token, and none is configured: set {section}.token or "
            f"{section}.token_file"
        )
        return JSONResponse({"error": text}, status_code=403)
    scheme, _, shown = request.headers.get("authorization", "").partition(" ")
    given = shown.strip().encode()
    if basic and scheme.lower() == "basic":
        given, scheme = _password(given), "bearer"
    if scheme.lower() == "bearer" and hmac.compare_digest(given, token):
        return None
    text = "the token is wrong" if shown else "a token is needed: Authorization: Bearer …"
    way = "Basic" if basic else "Bearer"
    headers = {"WWW-Authenticate": f'{way} realm="slotbridge"'}
    return JSONResponse({"error": text}, status_code=401, headers=headers)


def _password(credentials: bytes) -> bytes:
    """Return the password of `user:password` in base64, b"" where it is something else."""
    try:
        return base64.b64decode(credentials, validate=True).partition(b":")[2]
    except ValueError:
        return b""


def _wrong(message: str, subject: str, hint: str) -> SettingsError:
    return SettingsError(message, operation="read settings", subject=subject, hint=hint)
