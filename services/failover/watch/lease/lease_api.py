"""The Lease object of the API server (coordination.k8s.io/v1): read, create, replace.

Three requests of one resource, by the standard library. The package `kubernetes` would bring some
30 MB, and its leaderelection is not for us: it measures by the wall clock, asks without a deadline,
so that a server that hangs keeps a leader leading, and never gives a lease up.
"""

import json
import ssl
import urllib.error
import urllib.request
from collections.abc import Mapping
from http import HTTPStatus
from http.client import HTTPException
from pathlib import Path
from typing import Any

from schemas.errors import SettingsError
from services.failover.watch.lease.election import Lease

SERVICE_ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
_API = "coordination.k8s.io/v1"
_TEXT_MAX = 300
_OPENER_HANDLERS = (urllib.request.ProxyHandler({}),)
"""Without the proxies of our environment, which would see the token."""


class Conflict(Exception):
    """Another candidate wrote first, or the object is another one than was read."""


class Unanswered(Exception):
    """The API server gave no answer, or refused; whether it did as asked is not known."""


class LeaseApi:
    """One Lease, with the credentials of this pod's service account."""

    def __init__(
        self, url: str, namespace: str, name: str, *, account: Path, timeout_s: float
    ) -> None:
        self.name = name
        self.namespace = namespace
        self._collection = f"{url}/apis/{_API}/namespaces/{namespace}/leases"
        self._account = account
        self._timeout_s = timeout_s

    def read(self) -> Lease:
        """Return the Lease object, an empty Lease if it does not exist. Raise Unanswered."""
        document = self._ask("GET", f"{self._collection}/{self.name}", None)
        return Lease.of(document) if document is not None else Lease()

    def write(self, lease: Lease) -> Lease:
        """Replace the object that the lease's metadata name, or create it.

        Return it as the server has it then. Raise Conflict, Unanswered.
        """
        metadata = lease.metadata or {"name": self.name, "namespace": self.namespace}
        body = {"apiVersion": _API, "kind": "Lease", "metadata": metadata, "spec": lease.spec()}
        url = f"{self._collection}/{self.name}" if lease.exists else self._collection
        document = self._ask("PUT" if lease.exists else "POST", url, body)
        if document is None:
            raise Conflict
        return Lease.of(document)

    def _ask(self, method: str, url: str, body: dict[str, Any] | None) -> dict[str, Any] | None:
        """Return the answer's document, None for 404. Raise Conflict or Unanswered."""
        request = urllib.request.Request(  # noqa: S310 - the pod's own API server
            url,
            data=None if body is None else json.dumps(body).encode(),
            headers={"Accept": "application/json", "Content-Type": "application/json"},
            method=method,
        )
        try:
            # The kubelet replaces the token about every hour: it is read for each request.
            token = (self._account / "token").read_text(encoding="utf-8").strip()
            request.add_unredirected_header("Authorization", f"Bearer {token}")
            with self._opener().open(request, timeout=self._timeout_s) as answer:
                document = json.load(answer)
        except urllib.error.HTTPError as error:
            with error:
                _require_absence(error, method)
            return None
        except (OSError, HTTPException, ValueError) as error:
            reason = getattr(error, "reason", error)
            raise Unanswered(f"the API server does not answer: {reason}") from error
        if not isinstance(document, dict):
            raise Unanswered("the API server's answer is not a Lease")
        return document

    def _opener(self) -> urllib.request.OpenerDirector:
        """Return what opens the API server's URLs, with the cluster's certificate authority."""
        certificate = self._account / "ca.crt"
        if not self._collection.startswith("https:"):
            return urllib.request.build_opener(*_OPENER_HANDLERS)
        context = ssl.create_default_context(cafile=str(certificate))
        handler = urllib.request.HTTPSHandler(context=context)
        return urllib.request.build_opener(*_OPENER_HANDLERS, handler)


def lease_api(
    name: str, environment: Mapping[str, str], timeout_s: float, account: Path = SERVICE_ACCOUNT
) -> LeaseApi:
    """Return the Lease of this pod's namespace. Raise SettingsError outside of Kubernetes."""
    host = environment.get("KUBERNETES_SERVICE_HOST", "")
    port = environment.get("KUBERNETES_SERVICE_PORT", "443")
    try:
        namespace = (account / "namespace").read_text(encoding="utf-8").strip()
    except OSError:
        namespace = ""
    if not host or not namespace:
        missing = f"{account}/namespace" if host else "KUBERNETES_SERVICE_HOST"
        raise SettingsError(
            f"failover.watch.lease.name is set, and {missing} is missing, as outside of a pod",
            operation="elect a leader",
            subject=name,
            hint="leave failover.watch.lease.name empty outside of Kubernetes; in a pod, mount its "
            "service account's token (automountServiceAccountToken)",
        )
    at = f"[{host}]" if ":" in host else host
    url = f"https://{at}:{port}"
    return LeaseApi(url, namespace, name, account=account, timeout_s=timeout_s)


def _require_absence(error: urllib.error.HTTPError, method: str) -> None:
    """Raise Conflict or Unanswered for every refusal but 404."""
    if error.code == HTTPStatus.NOT_FOUND:
        return
    if error.code == HTTPStatus.CONFLICT:
        raise Conflict from error
    reason = _message(error)
    if error.code in (HTTPStatus.UNAUTHORIZED, HTTPStatus.FORBIDDEN):
        verb = {"GET": "get", "PUT": "update", "POST": "create"}[method]
        reason += f" (the service account needs `{verb}` of this Lease)"
    raise Unanswered(f"the API server refuses ({error.code}): {reason}") from error


def _message(error: urllib.error.HTTPError) -> str:
    try:
        text = str(json.loads(error.read(_TEXT_MAX * 8))["message"])
    except (OSError, HTTPException, ValueError, KeyError, TypeError):
        text = str(error.reason)
    return " ".join(text.split())[:_TEXT_MAX]
