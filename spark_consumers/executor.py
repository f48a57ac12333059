"""The command line of one of Spark's executors, in a pod of its own (docs/guides/tables.md).

Spark starts the image with the argument `executor`, and says the rest in the environment:

    SPARK_DRIVER_URL, SPARK_EXECUTOR_ID, …      an option each, as _OPTIONS lists them
    SPARK_EXECUTOR_MEMORY                       of Java's heap
    SPARK_JAVA_OPT_0, SPARK_JAVA_OPT_1, …       options of Java, in this order

(Spark's BasicExecutorFeatureStep writes it; Spark's own images read it in their entrypoint.sh.)
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Final

from schemas.errors import SettingsError

_BACKEND: Final = "org.apache.spark.scheduler.cluster.k8s.KubernetesExecutorBackend"
_MEMORY: Final = "SPARK_EXECUTOR_MEMORY"
_JAVA_OPTION: Final = "SPARK_JAVA_OPT_"
_OPTIONS: Final = {
    "--driver-url": "SPARK_DRIVER_URL",
    "--executor-id": "SPARK_EXECUTOR_ID",
    "--cores": "SPARK_EXECUTOR_CORES",
    "--app-id": "SPARK_APPLICATION_ID",
    "--hostname": "SPARK_EXECUTOR_POD_IP",
    "--resourceProfileId": "SPARK_RESOURCE_PROFILE_ID",
    "--podName": "SPARK_EXECUTOR_POD_NAME",
}


def executor_command(environment: Mapping[str, str], spark_home: Path) -> list[str]:
    """Return the command that becomes the executor. Raise SettingsError outside of such a pod."""
    lacking = [name for name in (_MEMORY, *_OPTIONS.values()) if name not in environment]
    if lacking:
        raise SettingsError(
            f"the environment lacks {', '.join(lacking)}",
            operation="start an executor",
            hint="Spark's driver starts executors itself: set tables.spark.mode in the chart",
        )
    home = environment.get("JAVA_HOME")
    memory = environment[_MEMORY]
    return [
        str(Path(home, "bin", "java")) if home else "java",
        *_java_options(environment),
        *(f"-Xms{memory}", f"-Xmx{memory}"),
        *("-cp", f"{spark_home}/jars/*"),
        _BACKEND,
        *(part for name, key in _OPTIONS.items() for part in (name, environment[key])),
    ]


def _java_options(environment: Mapping[str, str]) -> list[str]:
    """Return the options of Java in the order of their numbers."""
    numbers = sorted(
        int(number)
        for name in environment
        if name.startswith(_JAVA_OPTION) and (number := name.removeprefix(_JAVA_OPTION)).isdigit()
    )
    return [environment[f"{_JAVA_OPTION}{number}"] for number in numbers]
