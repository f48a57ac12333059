"""What the pod of an executor runs, from what Spark tells it: pure."""

from pathlib import Path

import pytest

from schemas.errors import SettingsError
from spark_consumers.executor import executor_command

TOLD = {
    "SPARK_DRIVER_URL": "spark://CoarseGrainedScheduler@driver.cdc.svc:7078",
    "SPARK_EXECUTOR_ID": "3",
    "SPARK_EXECUTOR_CORES": "1",
    "SPARK_APPLICATION_ID": "spark-1",
    "SPARK_EXECUTOR_POD_IP": "10.0.0.9",
    "SPARK_RESOURCE_PROFILE_ID": "0",
    "SPARK_EXECUTOR_POD_NAME": "slottables-exec-3",
    "SPARK_EXECUTOR_MEMORY": "1g",
    **{f"SPARK_JAVA_OPT_{number}": f"-Dn={number}" for number in range(12)},
}


def test_java_gets_its_options_in_order_and_the_executor_what_spark_told() -> None:
    found = executor_command({**TOLD, "JAVA_HOME": "/opt/java"}, Path("/spark"))
    backend = found.index("org.apache.spark.scheduler.cluster.k8s.KubernetesExecutorBackend")
    assert found[0] == "/opt/java/bin/java"
    assert found[1:13] == [f"-Dn={number}" for number in range(12)]
    assert found[13:backend] == ["-Xms1g", "-Xmx1g", "-cp", "/spark/jars/*"]
    options = dict(zip(found[backend + 1 :: 2], found[backend + 2 :: 2], strict=True))
    assert options == {
        "--driver-url": TOLD["SPARK_DRIVER_URL"],
        "--executor-id": "3",
        "--cores": "1",
        "--app-id": "spark-1",
        "--hostname": "10.0.0.9",
        "--resourceProfileId": "0",
        "--podName": "slottables-exec-3",
    }


def test_without_java_home_java_is_looked_for_on_the_path() -> None:
    assert executor_command(TOLD, Path("/spark"))[0] == "java"


def test_by_hand_it_is_refused_with_what_is_missing() -> None:
    told = {name: value for name, value in TOLD.items() if name != "SPARK_DRIVER_URL"}
    with pytest.raises(SettingsError, match="lacks SPARK_DRIVER_URL") as raised:
        executor_command(told, Path("/spark"))
    assert raised.value.hint
