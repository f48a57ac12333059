"""Java's classes, through Spark's gateway to Java."""

from typing import Any

from py4j.java_gateway import JavaClass  # type: ignore[import-untyped]


def java_class(java_object: Any, name: str) -> Any:
    """Return a Java class by its qualified name, through the gateway of `java_object`.

    With `jvm.org.apache…`, Py4J would look for each part of the name as a class first, in all jars.
    """
    return JavaClass(name, java_object._gateway_client)
