"""The bridge is told where the new primary is, by whoever has its token; its fences hold there."""

import json
import re
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import pytest
import yaml
from pydantic import SecretStr

from schemas.errors import SettingsError
from schemas.settings import SourceSettings
from services.bridge.session.control import source_at
from services.failover.model.conninfo import Address, at_any
from tests.conftest import NewPair
from tests.promises.bridge.running import Bridge
from tests.promises.failover.servers import (
    Ran,
    await_equal,
    configuration,
    create_subscription,
    slotfailover_process,
    tell,
    write,
)
from tests.providers.interface import Broker, Server, Trio
from tests.providers.slots import await_ready
from tests.providers.waiting import eventually, patient, patient_ms

TOKEN = "the-token-of-this-bridge"
SOURCE = SourceSettings.model_validate(
    {"conninfo": "host=a port=5432 user=u password='it\\'s' dbname=bank sslmode=require"}
)


def test_only_hosts_change() -> None:
    moved = source_at(SOURCE, {"conninfo": "host=b,::1 port=5433,5434"}).conninfo.get_secret_value()
    for part in ("user=u", "dbname=bank", "sslmode=require", "host=b,::1", "port=5433,5434"):
        assert part in moved
    assert "host=a" not in moved
    assert "require_auth=!password" in moved, "no server that is not verified gets the password"
    verified = SOURCE.model_copy(update={"conninfo": SecretStr("host=a sslmode=verify-full")})
    assert (
        "require_auth"
        not in source_at(verified, {"conninfo": "host=b"}).conninfo.get_secret_value()
    )
    places = at_any([Address("b", "", "1"), Address("", "10.0.0.2", "2")])
    assert places.text == "host='b,' hostaddr=',10.0.0.2' port='1,2'"
    assert source_at(SOURCE, {"conninfo": places.text}).slot == SOURCE.slot


@pytest.mark.parametrize(
    ("body", "said"),
    [
        (None, "not a JSON document"),
        (["host=b"], "not a JSON document"),
        ({"conninfo": 1}, "not a JSON document"),
        ({"conninfo": "host=b", "slot": "x"}, "not a JSON document"),
        ({"conninfo": "host=b port"}, "conninfo is not a connection string"),
        ({"conninfo": "host=b user=root"}, "user can't be changed by this request"),
        ({"conninfo": "host=b options=-cx=y"}, "options can't be changed by this request"),
        ({"conninfo": "postgresql://u:secret@b/x"}, "can't be changed by this request"),
        ({"conninfo": "port=5432"}, "does not name a host"),
        ({"conninfo": ""}, "does not name a host"),
        ({"conninfo": "host=b port=abc"}, "is not a connection string"),
        ({"conninfo": "host=b,c,d port=1,2"}, "3 hosts and 2 ports"),
        ({"conninfo": "host=" + "b," * 40 + "b"}, "more than 32 hosts"),
    ],
)
def test_a_wrong_body_is_refused_in_one_line(body: Any, said: str) -> None:
    with pytest.raises(SettingsError) as caught:
        source_at(SOURCE, body)
    assert said in caught.value.message or said in str(caught.value)
    assert "secret" not in str(caught.value)


@pytest.mark.long
def test_a_repoint_sends_the_bridge_to_the_new_primary_and_sees_its_marker_in_kafka(
    new_pair: NewPair, kafka: Broker, topic_prefix: str, tmp_path: Path
) -> None:
    trio = new_pair(synchronous=False)
    first = trio.primary.conninfo(trio.dbname)  # this host alone
    bridge = Bridge(tmp_path, first, kafka, topic_prefix, http_port=0, token=TOKEN)
    try:
        prepare(trio, bridge)
        url = eventually(lambda: served(bridge), what="the bridge serves")
        refuses_what_is_wrong(url, trio)
        sessions = bridge.sessions
        there = post(url, {"conninfo": place(trio.primary)}, TOKEN)
        assert there == (200, {"hosts": [f"127.0.0.1:{trio.primary.port}"], "writable": 1})
        eventually(lambda: bridge.sessions > sessions, what="a new session")
        write(trio.primary, trio.dbname, 1)
        bridge.caught_up(first)

        unlisted = "ALTER SYSTEM SET synchronized_standby_slots = ''"
        tell(trio.standby, unlisted, "SELECT pg_reload_conf()")
        trio.primary.kill()
        tell(trio.standby, "SELECT pg_promote()")
        wrong = repoint(
            tmp_path, trio, bridge, url, "not-" + TOKEN, step_deadline_ms=patient_ms(3_300)
        )
        assert wrong.code == 1, wrong.err
        assert "the bridge refuses (401): the token is wrong" in wrong.out
        ran = repoint(tmp_path, trio, bridge, url, TOKEN)
        assert ran.code == 0, ran.out + ran.err
        assert "send the bridge to 127.0.0.1" in ran.err
        assert TOKEN not in ran.out + ran.err + (tmp_path / "journal").read_text()
        write(trio.standby, trio.dbname, 101)
        await_equal(trio, trio.standby)
        new = trio.standby.conninfo(trio.dbname)
        bridge.caught_up(new)
        bridge.assert_kafka_equals(new, "t")
        ids = [event["after"]["id"] for event in bridge.events("t")]
        assert sorted(ids) == [*range(1, 11), *range(101, 111)]
        assert bridge.running
        again = repoint(tmp_path, trio, bridge, url, TOKEN)
        assert (again.code, "send the bridge" in again.err) == (0, False)
    finally:
        bridge.end()


def prepare(trio: Trio, bridge: Bridge) -> None:
    """A table with a subscription and the bridge, both ready on the standby."""
    for server in (trio.primary, trio.subscriber):
        tell(server, "CREATE TABLE t (id int PRIMARY KEY, note text)", dbname=trio.dbname)
    tell(trio.primary, "CREATE PUBLICATION p FOR ALL TABLES", dbname=trio.dbname)
    create_subscription(trio, "s1")
    bridge.start().streaming()
    for slot in ("s1", bridge.slot):
        await_ready(trio.primary, trio.standby, slot)


def served(bridge: Bridge) -> str:
    """Where the bridge answers; "" while it does not."""
    found = re.search(r"url=(http://\S+)/metrics", bridge.output)
    if found is None:
        return ""
    try:
        with urllib.request.urlopen(found[1] + "/healthz", timeout=patient(30)):
            return found[1]
    except OSError:
        return ""


def refuses_what_is_wrong(url: str, trio: Trio) -> None:
    there = {"conninfo": place(trio.primary)}
    assert post(url, there, "")[0] == 401
    assert post(url, there, TOKEN + "x")[0] == 401
    status, said = post(url, {"conninfo": "user=u"}, TOKEN)
    assert (status, said["error"]) == (400, "user can't be changed by this request")
    assert "host=a,b" in said["hint"]
    status, said = post(url, {"conninfo": place(trio.subscriber)}, TOKEN)
    assert (status, "the hosts have another database" in said["error"]) == (409, True)


def post(url: str, document: dict[str, Any], token: str) -> tuple[int, Any]:
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    body = json.dumps(document).encode()
    request = urllib.request.Request(f"{url}/v1/source", data=body, headers=headers)
    try:
        with urllib.request.urlopen(request, timeout=patient(30)) as answer:
            return answer.status, json.load(answer)
    except urllib.error.HTTPError as error:
        with error:
            return error.code, json.load(error)


def place(server: Server) -> str:
    return f"host=127.0.0.1 port={server.port}"


def repoint(folder: Path, trio: Trio, bridge: Bridge, url: str, token: str, **changes: Any) -> Ran:
    """`slotfailover repoint` with the bridge's settings in the same file."""
    document = yaml.safe_load(bridge.config.read_text())
    document["bridge"] |= {"control_url": url, "token": token}
    path = configuration(folder, trio, **changes)
    document |= yaml.safe_load(path.read_text())
    path.write_text(yaml.safe_dump(document))
    return slotfailover_process("repoint", "--config", str(path), "--yes")
