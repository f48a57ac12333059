"""Translates security options of librdkafka, as in `kafka.options`, into those of the Java client.

librdkafka                                              Java
security.protocol, sasl.mechanism(s)                    the same
ssl.ca.location, ssl.ca.pem                             ssl.truststore.certificates (PEM)
ssl.certificate.location/.pem, ssl.key.location/.pem    ssl.keystore.certificate.chain and .key
ssl.key.password                                        ssl.key.password
sasl.username, sasl.password                            sasl.jaas.config of PLAIN and SCRAM
sasl.oauthbearer.* with method oidc                     the same, sasl.jaas.config, a login callback

Files are read by the driver: executors need none of them. Sources: librdkafka's CONFIGURATION.md;
Kafka documentation, "Security", KIP-651 (PEM) and KIP-768 (OAUTHBEARER).
"""

from collections.abc import Mapping
from pathlib import Path

from schemas.errors import SetupError

_SAME = (
    "security.protocol",
    "ssl.endpoint.identification.algorithm",
    "ssl.key.password",
    "sasl.oauthbearer.token.endpoint.url",
)
_PACKAGE = "org.apache.kafka.common.security"
_MODULES = {
    "PLAIN": f"{_PACKAGE}.plain.PlainLoginModule",
    "SCRAM-SHA-256": f"{_PACKAGE}.scram.ScramLoginModule",
    "SCRAM-SHA-512": f"{_PACKAGE}.scram.ScramLoginModule",
    "OAUTHBEARER": f"{_PACKAGE}.oauthbearer.OAuthBearerLoginModule",
}
_LOGIN_CALLBACK = f"{_PACKAGE}.oauthbearer.OAuthBearerLoginCallbackHandler"
_PEM_PREFIXES = ("ssl.ca", "ssl.certificate", "ssl.key")
_UNKNOWN = ("ssl.keystore.location", "sasl.kerberos.keytab", "ssl.engine.location")


def java_security(client_options: Mapping[str, str]) -> dict[str, str]:
    """Return the options of Kafka's Java client that mean the same as `client_options`.

    Raise SetupError for what has no such options, and for files that can't be read or used.
    """
    for name in _UNKNOWN:
        if name in client_options:
            raise _refusal(
                f"{name} in kafka.options can't be passed to Spark",
                "give the client's certificate as ssl.certificate.location and ssl.key.location",
            )
    options = {name: client_options[name] for name in _SAME if name in client_options}
    authority, certificate, key = (_pem(client_options, prefix) for prefix in _PEM_PREFIXES)
    if authority:
        options |= {"ssl.truststore.type": "PEM", "ssl.truststore.certificates": authority}
    if certificate or key:
        if not (certificate and key):
            raise _refusal(
                "kafka.options has only one of a client certificate and its key",
                "set both ssl.certificate.location and ssl.key.location",
            )
        options |= {
            "ssl.keystore.type": "PEM",
            "ssl.keystore.certificate.chain": certificate,
            "ssl.keystore.key": _pkcs8(key),
        }
    return options | _sasl(client_options)


def _sasl(client_options: Mapping[str, str]) -> dict[str, str]:
    """Return Java's options for librdkafka's SASL options. Raise where they have no equal."""
    mechanism = client_options.get("sasl.mechanism", client_options.get("sasl.mechanisms", ""))
    if not mechanism and "sasl.username" not in client_options:
        return {}
    mechanism = mechanism or "PLAIN"
    if mechanism not in _MODULES:
        raise _refusal(
            f"the SASL mechanism {mechanism} can't be passed to Spark",
            f"use one of {', '.join(_MODULES)}",
        )
    options = {"sasl.mechanism": mechanism}
    if mechanism != "OAUTHBEARER":
        words = {"username": "sasl.username", "password": "sasl.password"}
    elif client_options.get("sasl.oauthbearer.method", "").lower() == "oidc":
        options["sasl.login.callback.handler.class"] = _LOGIN_CALLBACK
        words = {
            "clientId": "sasl.oauthbearer.client.id",
            "clientSecret": "sasl.oauthbearer.client.secret",
            "scope": "sasl.oauthbearer.scope",
        }
    else:
        raise _refusal(
            "OAUTHBEARER without sasl.oauthbearer.method: oidc can't be passed to Spark",
            "set sasl.oauthbearer.method to oidc, with client.id, client.secret and "
            "token.endpoint.url",
        )
    login = [
        f'{word}="{_escaped(client_options[name])}"'
        for word, name in words.items()
        if name in client_options
    ]
    options["sasl.jaas.config"] = f"{_MODULES[mechanism]} required {' '.join(login)};"
    return options


def _pem(client_options: Mapping[str, str], prefix: str) -> str:
    """Return the text of `<prefix>.pem`, or of the file in `<prefix>.location`, else ""."""
    if f"{prefix}.pem" in client_options:
        return client_options[f"{prefix}.pem"]
    name = f"{prefix}.location"
    if name not in client_options:
        return ""
    try:
        return Path(client_options[name]).read_text(encoding="ascii")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not in PEM form"
        raise _refusal(
            f"kafka.options: the file in {name} can't be read: {reason}",
            "make it readable for slottables, and give certificates in PEM form",
        ) from error


def _pkcs8(key: str) -> str:
    """Return the private key. Raise SetupError unless it is PKCS #8, all that Java knows."""
    if "BEGIN PRIVATE KEY" in key or "BEGIN ENCRYPTED PRIVATE KEY" in key:
        return key
    raise _refusal(
        "the private key in kafka.options is not in PKCS #8 form, which Java needs",
        "convert it: openssl pkcs8 -topk8 -nocrypt -in client.key -out client.pkcs8.key",
    )


def _escaped(text: str) -> str:
    """Escape a value of a JAAS configuration, which stands in double quotes."""
    return text.replace("\\", "\\\\").replace('"', '\\"')


def _refusal(reason: str, hint: str) -> SetupError:
    return SetupError(reason, operation="read Kafka's settings", hint=hint)
