"""An issuer of OAuth tokens for tests: client credentials in, a signed JWT out (RFC 6749, 7519)."""

import base64
import contextlib
import json
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import padding, rsa

CLIENT, SECRET, AUDIENCE = "tables", "planted-secret", "kafka"


class Issuer:
    """Answers POST /token and GET /keys; `tokens` counts those given out."""

    def __init__(self) -> None:
        self._key = rsa.generate_private_key(public_exponent=65537, key_size=2048)
        self.tokens = 0
        issuer = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                self.rfile.read(int(self.headers.get("Content-Length", 0)))
                login = base64.b64encode(f"{CLIENT}:{SECRET}".encode()).decode()
                if self.headers.get("Authorization") != f"Basic {login}":
                    self._answer(401, {"error": "invalid_client"})
                    return
                issuer.tokens += 1
                token = {"access_token": issuer.token(), "token_type": "Bearer"}
                self._answer(200, token | {"expires_in": 600})

            def do_GET(self) -> None:
                self._answer(200, issuer.keys())

            def _answer(self, status: int, body: object) -> None:
                content = json.dumps(body).encode()
                self.send_response(status)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(content)))
                self.end_headers()
                self.wfile.write(content)

            def log_message(self, *_: object) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}"

    def token(self) -> str:
        """A signed token for the subject CLIENT."""
        now = int(time.time())
        head = {"alg": "RS256", "typ": "JWT", "kid": "one"}
        claims = {"sub": CLIENT, "aud": AUDIENCE, "iat": now, "exp": now + 600, "scope": "read"}
        signed = ".".join(_encoded(json.dumps(part).encode()) for part in (head, claims))
        signature = self._key.sign(signed.encode(), padding.PKCS1v15(), hashes.SHA256())
        return f"{signed}.{_encoded(signature)}"

    def keys(self) -> dict[str, list[dict[str, str]]]:
        """The JSON Web Key Set."""
        numbers = self._key.public_key().public_numbers()
        n, e = (
            _encoded(value.to_bytes((value.bit_length() + 7) // 8, "big"))
            for value in (numbers.n, numbers.e)
        )
        return {
            "keys": [{"kty": "RSA", "kid": "one", "alg": "RS256", "use": "sig", "n": n, "e": e}]
        }


@contextlib.contextmanager
def issuer() -> Iterator[Issuer]:
    """Inside, it answers."""
    found = Issuer()
    thread = threading.Thread(target=found.server.serve_forever, name="issuer", daemon=True)
    thread.start()
    try:
        yield found
    finally:
        found.server.shutdown()
        found.server.server_close()
        thread.join()


def _encoded(content: bytes) -> str:
    return base64.urlsafe_b64encode(content).rstrip(b"=").decode()
