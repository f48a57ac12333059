"""Lists of hosts and service names, on real servers: by each of them a node is known, or none."""

from pathlib import Path

import pytest

from tests.conftest import NewPair
from tests.promises.failover.check.examining import quoted, set_on
from tests.promises.failover.servers import (
    ask,
    await_equal,
    configuration,
    slotfailover,
    subscribe,
    tell,
    write,
)
from tests.providers.waiting import eventually

LED = "SELECT subconninfo FROM pg_subscription"


@pytest.mark.long
def test_lists_of_hosts_and_service_names_through_a_failover(
    new_pair: NewPair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trio = new_pair()
    subscribe(trio, "s1")
    a, b = trio.primary, trio.standby
    services = tmp_path / "services.conf"
    services.write_text(
        "".join(f"[{s}]\nhost=127.0.0.1\nport={n.port}\n" for s, n in (("a", a), ("b", b)))
    )
    monkeypatch.setenv("PGSERVICEFILE", str(services))
    named = {name: f"service={name} user=postgres dbname=postgres" for name in "ab"}
    both = f"host=127.0.0.1,127.0.0.1 port={a.port},{b.port} user=postgres"
    either = f"{both} target_session_attrs=read-write"
    set_on(b, primary_conninfo=quoted(f"{either} dbname=postgres application_name=standby_1"))
    tell(
        trio.subscriber,
        f"ALTER SUBSCRIPTION s1 CONNECTION {quoted(f'{either} dbname={trio.dbname}')}",
        "CREATE SUBSCRIPTION strange CONNECTION 'service=shard2' PUBLICATION p"
        " WITH (connect = false, slot_name = s1)",
        dbname=trio.dbname,
    )
    config = configuration(tmp_path, trio, nodes={**named, "a": f"{both} dbname=postgres"})
    listed = slotfailover("check", "--config", config)
    assert (listed.code, f"127.0.0.1:{b.port} is an address of b and of a" in listed.err) == (
        2,
        True,
    ), listed.err

    config = configuration(tmp_path, trio, nodes=named)
    found = slotfailover("check", "--config", config, "--json").json["findings"]
    (strange,) = [f for f in found if f["check"] == "subscription-identified"]
    assert "service=shard2:5432 is not a known address of a node" in strange["what"]
    tell(
        trio.subscriber,
        "ALTER SUBSCRIPTION strange SET (slot_name = NONE)",
        "DROP SUBSCRIPTION strange",
        dbname=trio.dbname,
    )
    eventually(lambda: slotfailover("check", "--config", config).code == 0, what="all is well")

    refused = slotfailover("failover", "--config", config, "--yes", "--to", "b")
    assert (refused.code, "a is alive" in refused.err) == (35, True), refused.err
    a.kill()
    ran = slotfailover("failover", "--config", config, "--yes", "--json")
    assert ran.code == 0, ran.out + ran.err
    steps = [step["step"] for step in ran.json["steps"]]
    assert not [step for step in steps if "s1" in step and "point" in step], "its list has b"
    assert ask(trio.subscriber, LED, trio.dbname).startswith(either)
    write(b, trio.dbname, 1)
    await_equal(trio, b)
