"""The Kafka broker and the network before it: gone, slow, cut off, without disk."""

import os
import resource
import signal
from collections.abc import Callable

import psutil
import pytest

from services.testbed.kafka import KafkaBroker
from tests.promises.bridge.conftest import NewBridge
from tests.promises.bridge.faults.load import Load, assert_intact, await_session
from tests.promises.bridge.running import Bridge
from tests.providers.proxy import Proxy
from tests.providers.waiting import eventually

TIMEOUT_MS = 3000
LIMIT_BYTES = 64 * 1024
DELAY_S = 0.05
FAR_S = 0.15
LONG = {"transaction_timeout_ms": 600_000, "origin_idle_timeout_ms": 3_600_000}
"""Longer than any patience of a test: a stop does not wait for them."""


def behind(
    broker: KafkaBroker, proxy: Proxy, conninfo: str, new_bridge: NewBridge, timeout_ms: int
) -> Bridge:
    options = {"bootstrap.servers": f"127.0.0.1:{proxy.port}"}
    bridge = new_bridge(conninfo, broker=broker, options=options, transaction_timeout_ms=timeout_ms)
    return bridge.start().streaming()


@pytest.mark.parametrize("end", [pytest.param("stopped", marks=pytest.mark.long), "killed"])
def test_the_broker_is_gone_and_comes_again(
    conninfo: str,
    load: Load,
    own_kafka: KafkaBroker,
    to_kafka: Proxy,
    new_bridge: NewBridge,
    end: str,
) -> None:
    bridge = behind(own_kafka, to_kafka, conninfo, new_bridge, TIMEOUT_MS)
    load.more()
    own_kafka.stop() if end == "stopped" else own_kafka.kill()
    load.more(50)
    own_kafka.start()
    assert_intact(bridge, load, conninfo)


NETWORK: dict[str, Callable[[Proxy], None]] = {
    "cut": lambda proxy: proxy.cut(),
    "stalled": lambda proxy: proxy.stall(),
    "answers stalled": lambda proxy: proxy.stall("to_client"),
    "half-open at the bridge": lambda proxy: proxy.half_open("client"),
    "half-open at the broker": lambda proxy: proxy.half_open("server"),
}


@pytest.mark.long
@pytest.mark.parametrize("fault", list(NETWORK))
def test_the_network_is_gone_for_longer_than_the_time_out(
    conninfo: str,
    load: Load,
    own_kafka: KafkaBroker,
    to_kafka: Proxy,
    new_bridge: NewBridge,
    fault: str,
) -> None:
    bridge = behind(own_kafka, to_kafka, conninfo, new_bridge, TIMEOUT_MS)
    load.more()
    NETWORK[fault](to_kafka)
    eventually(lambda: "session lost" in bridge.output, what="the session is given up")
    assert bridge.running
    to_kafka.heal()
    await_session(bridge, 2)
    assert_intact(bridge, load, conninfo)


@pytest.mark.long
def test_a_slow_broker_costs_no_session(
    conninfo: str, load: Load, own_kafka: KafkaBroker, to_kafka: Proxy, new_bridge: NewBridge
) -> None:
    bridge = behind(own_kafka, to_kafka, conninfo, new_bridge, 60_000)
    to_kafka.delay(DELAY_S)
    load.more(100)
    assert_intact(bridge, load, conninfo)
    assert bridge.sessions == 1, bridge.output


def test_the_broker_is_out_of_disk(
    conninfo: str, load: Load, own_kafka: KafkaBroker, to_kafka: Proxy, new_bridge: NewBridge
) -> None:
    """A file that can't grow is what a full disk is to it: its log folder fails, and it halts."""
    bridge = behind(own_kafka, to_kafka, conninfo, new_bridge, TIMEOUT_MS)
    load.more()
    (broker,) = {
        psutil.Process(c.pid)
        for c in psutil.net_connections("tcp")
        if c.status == psutil.CONN_LISTEN and c.laddr and c.laddr.port == own_kafka.port
    }
    resource.prlimit(broker.pid, resource.RLIMIT_FSIZE, (LIMIT_BYTES, LIMIT_BYTES))
    eventually(lambda: not own_kafka.running, what="the broker halts", timeout_s=60)
    assert bridge.running, bridge.output
    own_kafka.stop()
    own_kafka.start()
    assert_intact(bridge, load, conninfo)


@pytest.mark.long
def test_kafka_is_far_away_when_the_bridge_starts(
    conninfo: str,
    load: Load,
    own_kafka: KafkaBroker,
    to_kafka: Proxy,
    new_bridge: NewBridge,
) -> None:
    """A round trip takes 300 ms, and the first list of topics longer than half a second."""
    options = {"bootstrap.servers": f"127.0.0.1:{to_kafka.port}"}
    to_kafka.delay(FAR_S)
    bridge = new_bridge(conninfo, broker=own_kafka, options=options).start()
    await_session(bridge, 1)
    load.more()
    assert bridge.stop() == 0, bridge.output
    to_kafka.heal()
    bridge.start()
    await_session(bridge, 2)
    assert_intact(bridge, load, conninfo)


@pytest.mark.long
def test_a_stop_does_not_wait_for_a_broker_that_stands_still(
    conninfo: str, load: Load, own_kafka: KafkaBroker, new_bridge: NewBridge
) -> None:
    """A supervisor kills after a minute. The next start goes on from what Kafka has."""
    bridge = new_bridge(conninfo, broker=own_kafka, **LONG).start().streaming()
    load.more()
    own_kafka.pause()
    try:
        load.more(20)
        os.kill(bridge.pid, signal.SIGTERM)
        assert bridge.exit_code() == 0, bridge.output
    finally:
        own_kafka.resume()
    bridge.start()
    assert_intact(bridge, load, conninfo)
