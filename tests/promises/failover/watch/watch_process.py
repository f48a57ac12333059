"""`slotfailover watch` as a process, asked over HTTP as its users ask it."""

import json
import subprocess
import sys
import urllib.error
import urllib.request
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.promises.failover.servers import COMMAND
from tests.providers.waiting import eventually, patient

TOKEN = "a-token-of-the-tests"
SETTINGS: dict[str, Any] = {
    "repoint": True,
    "interval_ms": 150,
    "quorum": 3,
    "settle_ms": 600,
    "cooldown_ms": 500,
    "http_port": 0,
}


@dataclass(frozen=True)
class Answer:
    """An answer of the server."""

    status: int
    headers: dict[str, str]
    text: str

    @property
    def json(self) -> Any:
        return json.loads(self.text)


class Watching:
    """One replica; it logs to a file of its own in `folder`."""

    def __init__(self, config: Path, name: str = "watch") -> None:
        self.log = config.with_name(f"{name}.log")
        with self.log.open("wb") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-c", COMMAND, "watch", "--config", config, "--json"],
                stdout=log,
                stderr=log,
            )
        self.url = eventually(self._served, what="watch serves", timeout_s=90)

    def ask(
        self, path: str, *, token: str = "", body: bytes | None = None, method: str = ""
    ) -> Answer:
        """One request; a body makes it a POST."""
        headers = {"Authorization": f"Bearer {token}"} if token else {}
        request = urllib.request.Request(
            self.url + path, data=body, headers=headers, method=method or None
        )
        try:
            with urllib.request.urlopen(request, timeout=patient(30)) as answer:
                return Answer(answer.status, dict(answer.headers), answer.read().decode())
        except urllib.error.HTTPError as error:
            with error:
                return Answer(error.code, dict(error.headers), error.read().decode())

    @property
    def status(self) -> Any:
        return self.ask("v1/status").json

    def order(self, what: str, reason: str = "") -> Any:
        """Pause or resume it, with the token; again where its round takes longer than it waits."""
        body = json.dumps({"reason": reason}).encode()

        def said() -> Answer | None:
            answer = self.ask(f"v1/{what}", token=TOKEN, body=body)
            assert answer.status in (200, 202), answer.text
            return answer if answer.status == 200 else None

        answer = eventually(said, what=f"{what} is in effect")
        assert answer is not None
        return answer.json

    def metric(self, name: str) -> float:
        """The value of a metric without labels, or with those in `name`."""
        lines = [line for line in self.ask("metrics").text.splitlines() if line.startswith(name)]
        assert len(lines) == 1, (name, lines)
        return float(lines[0].rsplit(" ", 1)[1])

    def await_verdict(self, verdict: str) -> Any:
        """Wait until that is what it decides."""

        def so() -> Any:
            status = self.status
            return status if status["decision"]["verdict"] == verdict else None

        return eventually(so, what=f"watch decides: {verdict}", timeout_s=60)

    def await_rounds(self, count: int) -> None:
        """Let it observe that often."""
        until = self.status["observations"] + count
        eventually(lambda: self.status["observations"] >= until, what="it observes", timeout_s=60)

    @property
    def events(self) -> list[str]:
        return [event["text"] for event in self.status["events"]]

    @property
    def output(self) -> str:
        return self.log.read_text()

    def kill(self) -> None:
        """SIGKILL."""
        self._process.kill()
        self._process.wait(timeout=patient(30))

    def stop(self) -> int:
        """SIGTERM; returns the exit code."""
        self._process.terminate()
        return self._process.wait(timeout=patient(60))

    def end(self) -> None:
        """Whatever it does."""
        if self._process.poll() is None:
            self.kill()

    def _served(self) -> str:
        assert self._process.poll() is None, self.output
        for line in self.output.rpartition("\n")[0].splitlines():  # the last may be half written
            document = json.loads(line) if line.startswith("{") else {}
            if document.get("event") == "watching" and _answers(document["url"] + "healthz"):
                return str(document["url"])
        return ""


def _answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=patient(30)) as answer:
            return bool(answer.status == 200)
    except OSError:
        return False
