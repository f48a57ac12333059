"""Java's classes, through Spark's gateway to Java, and a class of our own.

That one is compiled when it is first needed, by the compiler that Spark has with it (Janino): it
needs no build step, no jar among spark.jars, and works by spark-submit as it does embedded.
"""

import threading
from pathlib import Path
from typing import Any, Final

from py4j.java_gateway import JavaClass  # type: ignore[import-untyped]

_SOURCES: Final = Path(__file__).with_name("apply")
_CLASSES: Final = ("LocalOperations", "TableFiles")
"""Each may use those before it."""
_programs: list[tuple[Any, Any]] = []
"""The gateway to Java, and our Java in it."""
_compiling = threading.Lock()


def java_class(java_object: Any, name: str) -> Any:
    """Return a Java class by its qualified name, through the gateway of `java_object`.

    With `jvm.org.apache…`, Py4J would look for each part of the name as a class first, in all jars.
    """
    return JavaClass(name, java_object._gateway_client)


def table_files(java_object: Any) -> Any:
    """Return our Java (apply/TableFiles.java) in the Java of the object `java_object`."""
    client = java_object._gateway_client
    with _compiling:
        if not _programs or _programs[0][0] is not client:
            thread = java_class(java_object, "java.lang.Thread").currentThread()
            loader = thread.getContextClassLoader()
            for name in _CLASSES:
                compiler = java_class(java_object, "org.codehaus.janino.SimpleCompiler")()
                compiler.setParentClassLoader(loader)
                compiler.cook((_SOURCES / f"{name}.java").read_text(encoding="utf-8"))
                loader = compiler.getClassLoader()
            program = loader.loadClass(_CLASSES[-1]).newInstance()
            _programs[:] = [(client, program)]
        return _programs[0][1]
