"""Rounds with a cut-off manager, a frozen primary, and signals inside a switchover."""

import contextlib
import signal
import subprocess
import sys

from services.testbed.ports import free_port
from tests.promises.failover.frozen_server import frozen
from tests.promises.failover.rounds.rig import PATIENCE_S, PROMOTED, REFUSED, Rig, Round
from tests.promises.failover.servers import COMMAND, word_of
from tests.providers.proxy import Proxy
from tests.providers.waiting import eventually, patient


def cut_off(rig: Rig) -> Round:
    """Nothing that is tried promotes; afterwards the roles are changed in order."""
    name = rig.primary
    proxy = Proxy(rig.servers[name].port)
    what = rig.dice.choice(["refused", "reset", "stalled", "unknown host"])
    refused = {}
    if what == "refused":
        refused = {name: f"host=127.0.0.1 port={free_port()} user=postgres"}
    elif what == "unknown host":
        refused = {name: "host=nowhere.invalid user=postgres"}
    else:  # nodes are named themselves else: a proxy takes connections for a server that is down
        refused = {name: rig.servers[name].conninfo(port=proxy.port)}
        (proxy.cut if what == "reset" else proxy.stall)()
    word = word_of(rig.servers[rig.other(name)], name)
    orders = [["failover"], ["failover", *word], ["resume"]]
    codes = [rig.order(*order, **refused).code for order in orders]
    proxy.close()
    assert codes[:2] == [REFUSED, REFUSED], (what, codes)
    assert codes[2] in (34, REFUSED), (what, codes)
    rig.settle()
    assert rig.primary == name
    rig.hand_over()
    return Round(what, codes, rig.primary)


def freeze(rig: Rig) -> Round:
    """Frozen, it is not replaced; thawed, it goes on; fenced by its command, it is replaced."""
    name = rig.primary
    server = rig.servers[name]
    wholly, shot = rig.dice.random() < 0.5, rig.dice.random() < 0.5
    with frozen(server, wholly=wholly):
        word = word_of(rig.servers[rig.other(name)], name)
        codes = [rig.order("failover").code, rig.order("failover", *word).code]
        assert codes == [REFUSED, REFUSED], codes
        if shot:
            ran = rig.order("failover", "--fence")
            assert ran.code in PROMOTED, ran.err
            codes.append(ran.code)
    if shot:
        rig.complete("rejoin", name)
        assert rig.primary == rig.other(name)
    rig.settle()
    what = f"{'the server' if wholly else 'the postmaster'}, {'fenced' if shot else 'thawed'}"
    return Round(what, codes, rig.primary)


def signals(rig: Rig) -> Round:
    """A signal at any time, half of them around the promotion: what is said is so, and `resume` or
    the same order completes it.
    """
    name = rig.primary
    new = rig.other(name)
    number = rig.dice.choice([signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
    twice = rig.dice.random() < 0.5
    since, after_s = rig.dice.choice([("begin", 4.0), (f"promote {new}", 0.3)])
    after_s *= rig.dice.random()
    before, ended = rig.entries(since), rig.entries("end")
    command = [sys.executable, "-c", COMMAND, "switchover", "--to", new, "--yes"]
    with subprocess.Popen(
        [*command, "--config", str(rig.settings())],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        eventually(
            lambda: rig.entries(since) > before or process.poll() is not None,
            what=f"the command has come to: {since}",
            timeout_s=PATIENCE_S,
            interval_s=0.002,
        )
        for _ in range(1 + twice):
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(after_s)
            with contextlib.suppress(ProcessLookupError):
                process.send_signal(number)
            after_s = 0.05
        said = process.communicate(timeout=patient(PATIENCE_S))[1]
    codes = [process.returncode]
    became = "done"
    if "; it was taken back" in said:
        became = "taken back"
        now = said.rpartition("Now ")[2]
        assert f"{name} is the primary" in now, said
        assert f"{new} is a standby" in now, said
        assert rig.primary == name, said
    elif codes[0] < 0:  # the signal ended the process, which had done all and not yet ended itself
        became = "done"
        assert (rig.primary, rig.entries("end")) == (new, ended + 1), said
    elif codes != [0]:
        became = "not taken back"
        assert "nothing was taken back" in said or rig.primary == name, said
    if codes != [0]:
        codes.append(rig.order("resume").code)
        for order in (["switchover", "--to", new], ["rejoin", name]):
            ran = rig.order(*order)
            codes.append(ran.code)
            assert ran.code == 0, (codes, said, ran.err)
    rig.settle()
    assert rig.primary == new
    return Round(f"{number.name}{', twice' if twice else ''}: {became}", codes, rig.primary)
