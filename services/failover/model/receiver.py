"""A standby's receiver kept from every primary, by a primary_conninfo that leads nowhere. Pure.

    before   host=10.0.0.1 port=5432 user=replicator password=…
    cut      host=/slotfailover-cut/<where it led, in hex> hostaddr='' port=5432 user=… password=…

The server ends its receiver when the setting changes, and can't connect anew: that folder has no
socket. Nothing but host and hostaddr is changed, and both can be read back from it, by any later
command: nothing has to be remembered elsewhere. An empty hostaddr keeps a service file's from
being used.
"""

import json

from services.failover.model.conninfo import Conninfo

_NOWHERE = "/slotfailover-cut/"


def cut_off(conninfo: Conninfo) -> Conninfo:
    """Return the same connection string with a host that leads nowhere."""
    if is_cut(conninfo):
        return conninfo
    led = {key: value for key, value in conninfo.pairs if key in ("host", "hostaddr")}
    nowhere = _NOWHERE + json.dumps(led).encode().hex()
    kept = tuple(pair for pair in conninfo.pairs if pair[0] not in ("host", "hostaddr"))
    return Conninfo((("host", nowhere), ("hostaddr", ""), *kept))


def is_cut(conninfo: Conninfo) -> bool:
    """Tell whether `cut_off` made this connection string."""
    return conninfo.value("host").startswith(_NOWHERE)


def reconnected(conninfo: Conninfo) -> Conninfo:
    """Return the connection string that `cut_off` was given; return any other unchanged."""
    if not is_cut(conninfo):
        return conninfo
    led = json.loads(bytes.fromhex(conninfo.value("host").removeprefix(_NOWHERE)))
    kept = tuple(pair for pair in conninfo.pairs if pair[0] not in ("host", "hostaddr"))
    return Conninfo((*led.items(), *kept))
