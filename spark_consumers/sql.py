"""Spark SQL as text: names and strings, quoted.

Expressions are given to Spark as text, not put together from its Column objects: each of those is
several calls from Python to Java, thousands for an epoch, and its parser reads text in no time.
"""

from collections.abc import Iterable, Mapping

from pyspark.sql import types as T


def quoted(name: str) -> str:
    """Quote `name` as one identifier."""
    return "`" + name.replace("`", "``") + "`"


def literal(text: str) -> str:
    """Quote `text` as a string."""
    escaped = text.replace("\\", "\\\\").replace("'", "\\'")
    return f"'{escaped}'"


def literals(texts: Iterable[str]) -> str:
    """Quote `texts` as the arguments of a function, or of IN."""
    return ", ".join(map(literal, texts))


def pairs(values: Mapping[str, str]) -> str:
    """Quote names and their values as in TBLPROPERTIES."""
    return ", ".join(f"{literal(name)} = {literal(value)}" for name, value in values.items())


def null(name: str, kind: T.DataType) -> str:
    """Return SQL of a column that is always NULL."""
    return f"CAST(NULL AS {kind.simpleString()}) AS {quoted(name)}"
