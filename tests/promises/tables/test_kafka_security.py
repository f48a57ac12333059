"""Kafka that takes only who it knows: Spark reads by SCRAM, client certificate and OAuth token."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from schemas.errors import SetupError
from schemas.settings import KafkaSettings, Settings, SourceSettings
from schemas.tables import TablesSettings
from services.testbed.bed import Bed
from services.testbed.kafka import KafkaBroker
from spark_consumers.kafka.security import java_security
from tests.promises.tables import issuer as tokens
from tests.promises.tables.conftest import Pipeline
from tests.promises.tables.issuer import Issuer
from tests.promises.tables.publisher import Publisher, SourceTable
from tests.providers.secured import (
    TABLES_ACLS,
    Certificates,
    allow,
    scram_options,
    secured_kafka,
)

TABLE = SourceTable("things", {"id": ("int8", -1), "name": ("text", -1)})
_OAUTH = "org.apache.kafka.common.security.oauthbearer"


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    made = Certificates(tmp_path_factory.mktemp("tls") / "certificates")
    made.make()
    return made


@pytest.fixture(scope="module")
def issuer() -> Iterator[Issuer]:
    with tokens.issuer() as found:
        yield found


@pytest.fixture(scope="module")
def broker(
    servers: None,
    certificates: Certificates,
    issuer: Issuer,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[KafkaBroker]:
    prefix = "listener.name.sasl_ssl.oauthbearer.sasl"
    settings = {
        "sasl.enabled.mechanisms": "SCRAM-SHA-512,OAUTHBEARER",
        f"{prefix}.jaas.config": f"{_OAUTH}.OAuthBearerLoginModule required;",
        f"{prefix}.server.callback.handler.class": f"{_OAUTH}.OAuthBearerValidatorCallbackHandler",
        f"{prefix}.oauthbearer.jwks.endpoint.url": f"{issuer.url}/keys",
        f"{prefix}.oauthbearer.expected.audience": tokens.AUDIENCE,
    }
    allowed = f"-Dorg.apache.kafka.sasl.oauthbearer.allowed.urls={issuer.url}/keys"
    with Bed(tmp_path_factory.mktemp("bed"), lazy=True) as bed:
        yield secured_kafka(
            bed, certificates, settings=settings, environment={"JAVA_TOOL_OPTIONS": allowed}
        )


@pytest.mark.parametrize(
    ("how", "protocol", "principal"),
    [
        ("scram", "SASL_SSL", "User:bridge"),
        ("certificate", "SSL", "User:CN=bridge"),
        ("token", "SASL_SSL", f"User:{tokens.CLIENT}"),
    ],
)
def test_tables_are_filled_as_a_principal_with_the_documented_acls(
    broker: KafkaBroker,
    certificates: Certificates,
    issuer: Issuer,
    spark: SparkSession,
    warehouse: Path,
    topic_prefix: str,
    how: str,
    protocol: str,
    principal: str,
) -> None:
    authority = {"ssl.ca.location": str(certificates.path("authority.pem"))}
    options = {
        "scram": scram_options(certificates),
        "certificate": authority
        | {
            "security.protocol": "SSL",
            "ssl.certificate.location": str(certificates.path("client.pem")),
            "ssl.key.location": str(certificates.path("client.key")),
        },
        "token": authority
        | {
            "security.protocol": "SASL_SSL",
            "sasl.mechanisms": "OAUTHBEARER",
            "sasl.oauthbearer.method": "oidc",
            "sasl.oauthbearer.client.id": tokens.CLIENT,
            "sasl.oauthbearer.client.secret": tokens.SECRET,
            "sasl.oauthbearer.token.endpoint.url": f"{issuer.url}/token",
        },
    }[how]
    allow(broker, principal, topic_prefix, TABLES_ACLS)
    pipeline = Pipeline(
        spark,
        Settings(
            source=SourceSettings(conninfo="host=a", publication="p"),
            kafka=KafkaSettings(
                bootstrap_servers=f"localhost:{broker.secured[protocol]}",
                topic_prefix=topic_prefix,
                options=options,
            ),
            tables=TablesSettings(warehouse=str(warehouse), trigger_interval_ms=200),
        ),
        Publisher(broker.bootstrap_servers, topic_prefix),
    )
    pipeline.publisher.announce(TABLE)
    with pipeline.publisher.transaction() as t:
        t.insert(TABLE, {"id": 1, "name": how})
    before = issuer.tokens
    assert [report.epoch for report in pipeline.stream(once=True)] == [1]
    assert [row["name"] for row in pipeline.rows("things")] == [how]
    assert (issuer.tokens > before) == (how == "token")
    pipeline.restart()


def test_the_same_in_the_options_of_the_java_client(certificates: Certificates) -> None:
    pem = {name: certificates.path(name).read_text() for name in ("authority.pem", "client.pem")}
    key = certificates.path("client.key")
    assert java_security(
        {
            "security.protocol": "SSL",
            "ssl.ca.pem": pem["authority.pem"],
            "ssl.certificate.pem": pem["client.pem"],
            "ssl.key.location": str(key),
            "ssl.key.password": "planted",
            "linger.ms": "5",
        }
    ) == {
        "security.protocol": "SSL",
        "ssl.key.password": "planted",
        "ssl.truststore.type": "PEM",
        "ssl.truststore.certificates": pem["authority.pem"],
        "ssl.keystore.type": "PEM",
        "ssl.keystore.certificate.chain": pem["client.pem"],
        "ssl.keystore.key": key.read_text(),
    }
    plain = java_security({"sasl.username": 'a"b', "sasl.password": "c\\d"})
    assert plain["sasl.jaas.config"].endswith(r'username="a\"b" password="c\\d";')


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"ssl.ca.location": "/nowhere/ca.pem"}, "ssl.ca.location can't be read"),
        ({"ssl.certificate.pem": "c"}, "only one of a client certificate and its key"),
        ({"ssl.certificate.pem": "c", "ssl.key.pem": "BEGIN RSA PRIVATE KEY"}, "PKCS #8"),
        ({"sasl.mechanism": "GSSAPI"}, "GSSAPI can't be passed"),
        ({"sasl.mechanism": "OAUTHBEARER"}, "without sasl.oauthbearer.method"),
        ({"ssl.keystore.location": "k.p12"}, "ssl.keystore.location in kafka.options"),
    ],
)
def test_option_that_the_java_client_lacks_is_refused(given: dict[str, str], expected: str) -> None:
    with pytest.raises(SetupError, match=expected):
        java_security(given)
