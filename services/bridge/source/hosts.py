"""The hosts of source.conninfo, each with a conninfo of its own."""

import psycopg
from psycopg.conninfo import conninfo_to_dict, make_conninfo
from pydantic import SecretStr

from schemas.errors import SettingsError
from schemas.settings import SourceSettings
from services.postgres.conninfo import resolved


def single_hosts(settings: SourceSettings) -> list[str]:
    """Return one conninfo per host, also of those that a service file or the environment names.

    Raise SettingsError for a text that libpq does not take.
    """
    parameters = _parameters(settings.conninfo, settings.connect_timeout_s, "source.conninfo")
    host_list = parameters.pop("host", "").split(",")
    address_list = parameters.pop("hostaddr", "").split(",")
    port_list = parameters.pop("port", "").split(",")
    count = max(len(host_list), len(address_list))
    if not all(port.isdigit() or not port for port in port_list):
        raise _not_a_conninfo("source.conninfo")
    if len(port_list) not in (1, count):
        raise SettingsError(
            f"source.conninfo has {count} hosts and {len(port_list)} ports",
            operation="read settings",
            hint="give one port, or one for each host",
        )
    result = []
    for index in range(count):
        one = dict(parameters)
        for key, values in (("host", host_list), ("hostaddr", address_list), ("port", port_list)):
            value = values[index] if index < len(values) else values[0] if key == "port" else ""
            if value:
                one[key] = value
        result.append(make_conninfo("", **one))
    return result


def standby_conninfo(conninfo: SecretStr, connect_timeout_s: int) -> str:
    """Return snapshot.conninfo with time-outs. Raise SettingsError for a text libpq refuses."""
    return make_conninfo("", **_parameters(conninfo, connect_timeout_s, "snapshot.conninfo"))


def _parameters(conninfo: SecretStr, connect_timeout_s: int, setting: str) -> dict[str, str]:
    """Return the connection's parameters, with libpq's environment and service file."""
    try:
        parameters = resolved(conninfo.get_secret_value())
    except psycopg.ProgrammingError:
        raise _not_a_conninfo(setting) from None  # libpq's own text would repeat parts of it
    parameters.setdefault("connect_timeout", str(connect_timeout_s))
    return parameters


def _not_a_conninfo(setting: str) -> SettingsError:
    return SettingsError(
        f"{setting} is not a connection string",
        operation="read settings",
        hint="write keyword=value pairs, values with blanks in single quotes, or a postgresql:// "
        "URI with special characters percent-encoded; a service must be in the service file",
    )


def host_name(conninfo: str) -> str:
    """Return `host:port` of one host's conninfo, for messages."""
    where = conninfo_to_dict(conninfo)
    return f"{where.get('host') or where.get('hostaddr', '')}:{where.get('port') or 5432}"
