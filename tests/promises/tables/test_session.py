"""What Spark is started with, by us and by spark-submit."""

from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import SparkSession

from schemas.errors import ExitCode, SetupError
from schemas.settings import KafkaSettings
from schemas.tables import TablesSettings
from spark_consumers.session import QUIET, catalog_options, session_options

KAFKA = KafkaSettings(bootstrap_servers="none:1", topic_prefix="p")
ICEBERG = "org.apache.iceberg.spark.extensions.IcebergSparkSessionExtensions"
SHUFFLE = "spark.sql.shuffle.partitions"
ADAPTIVE = "spark.sql.adaptive.enabled"


def tables(**options: str) -> TablesSettings:
    return TablesSettings(
        warehouse=Path("/w"),
        catalog_options={"jdbc.password": "planted"},
        spark_options={name.replace("__", "."): value for name, value in options.items()},
    )


def test_embedded_it_shuffles_little() -> None:
    found = session_options(tables(), KAFKA, None)
    assert (found[SHUFFLE], found[ADAPTIVE], found["spark.master"]) == ("2", "false", "local[*]")
    assert session_options(tables(spark__sql__shuffle__partitions="9"), KAFKA, None)[SHUFFLE] == "9"


def test_options_of_spark_submit_stay() -> None:
    given = {SHUFFLE: "400", "spark.ui.enabled": "true", "spark.driver.memory": "8g"}
    found = session_options(tables(), KAFKA, given)
    assert not {*given, ADAPTIVE, "spark.master", "spark.driver.extraJavaOptions"} & set(found)


def test_options_that_rows_depend_on_are_ours() -> None:
    given = {"spark.sql.session.timeZone": "Europe/Paris", "spark.sql.extensions": "other.One"}
    found = session_options(tables(), KAFKA, given)
    assert found["spark.sql.session.timeZone"] == "UTC"
    assert found["spark.sql.extensions"] == f"other.One,{ICEBERG}"


def test_no_option_of_a_catalog_is_on_the_command_line() -> None:
    asked = tables(spark__sql__catalog__slotbridge__token="planted")
    found = session_options(asked, KAFKA, None)
    assert "planted" not in str(found)


def test_each_catalog_gets_what_it_needs_and_no_more() -> None:
    def options(**given: object) -> dict[str, str]:
        found = catalog_options(TablesSettings.model_validate({"warehouse": "s3://b/w"} | given))
        prefix = "spark.sql.catalog.slotbridge."
        return {n.removeprefix(prefix): v for n, v in found.items() if n.startswith(prefix)}

    s3 = {"warehouse": "s3://b/w", "io-impl": "org.apache.iceberg.aws.s3.S3FileIO"}
    uncached = {"cache-enabled": "false"}
    assert options(catalog_type="glue") == {"type": "glue", **s3, **uncached}
    assert options(catalog_type="rest", catalog_uri="http://c") == {
        "type": "rest",
        "uri": "http://c",
        **uncached,
    }
    assert options(catalog_type="custom", catalog_options={"catalog-impl": "x.Y"}) == {
        "catalog-impl": "x.Y",
        **s3,
        **uncached,
    }
    jdbc = options(catalog_uri="jdbc:postgresql://db/c", catalog_options={"io-impl": "x.IO"})
    assert (jdbc["type"], jdbc["uri"], jdbc["io-impl"]) == (
        "jdbc",
        "jdbc:postgresql://db/c",
        "x.IO",
    )


def test_a_warehouse_that_can_not_be_written_is_named() -> None:
    with pytest.raises(SetupError, match="can't be written") as raised:
        catalog_options(tables().model_copy(update={"warehouse": "/proc/warehouse"}))
    assert raised.value.subject == "/proc/warehouse"
    assert raised.value.exit_code is ExitCode.PRIVILEGE_MISSING


@pytest.mark.parametrize("name", QUIET)
def test_the_classes_that_must_log_less_are_in_this_spark(spark: SparkSession, name: str) -> None:
    """A name that Spark has moved would bring a warning with each micro-batch."""
    jvm: Any = spark._jvm
    loader = jvm.java.lang.Thread.currentThread().getContextClassLoader()
    assert loader.loadClass(name).getName() == name
