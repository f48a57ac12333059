"""Expressions over a row's columns, in CEL (the Common Expression Language). Pure.

Each is compiled and type-checked once per relation; CEL can't loop for ever or touch anything
outside of its values. A column goes by its name, or as `row.name` where CEL has the name itself.

    int2 int4 int8 oid     int              bool                 bool
    float4 float8          double           bytea                bytes
    timestamptz            timestamp        json, jsonb          map, list, …, as JSON has it
    others, numeric too    string: PostgreSQL's text form

NULL is null, and what CEL can't compute of it is NULL, as in SQL: `&&` and `||` of CEL have the
results of SQL's AND and OR. Other failures are ExpressionFailed. CEL's message does not always
tell which of the two a failure is. So a row that fails is evaluated again with other values than
its NULLs: a type that is still wrong then is that of a value in its JSON.
"""

import difflib
import json
import re
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from functools import lru_cache
from typing import Any, Final, NamedTuple

from google.protobuf.empty_pb2 import Empty
from google.protobuf.timestamp_pb2 import Timestamp

from schemas.errors import SettingsError
from services.bridge.events.errors import ExpressionFailed
from services.bridge.events.values.plain import bytea_bytes
from services.bridge.pgoutput.messages import Relation, Value
from services.bridge.pgoutput.type_names import built_in

_IDENTIFIER: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_WRONG_TYPE: Final = re.compile(
    "No matching overload|Applying SELECT to non-message|Invalid container type|"
    "Invalid map key type|Index error: expected integer type"
)
_WITHOUT_TYPES: Final = re.compile("Applying SELECT|No matching overload[^(]*$")
_ANY_TYPE: Final = re.compile(r"[\[{]|\bdyn\b")
"""What lets an expression without JSON have values of any type: lists, maps, `dyn`."""
_NULL: Final = "null_type"
_MARK: Final = "struct"
"""How CEL's messages name the type of Empty, which no value of a row has."""
_OTHER_JSON: Final[tuple[Any, ...]] = (Empty(), True, [])
"""What stands for a NULL of JSON in turns; nearly all that fits no type fits one of them."""
_INT64: Final = 2**63


class _Kind(NamedTuple):
    """How values of a type reach an expression: CEL's type, and the conversion."""

    declared: str
    convert: Callable[[bytes], Any]
    others: tuple[Any, Any] | None = None
    """Two values of the type, one low and one high; None where values have any type."""


def _timestamp(value: bytes) -> Timestamp:
    found = Timestamp()
    found.FromDatetime(datetime.fromisoformat(value.decode("ascii")).astimezone(UTC))
    return found


def _text(value: bytes) -> str:
    return value.decode("utf-8")


_TEXT: Final = _Kind("google.protobuf.StringValue", _text, ("", "\U0010ffff"))
_INT: Final = _Kind("google.protobuf.Int64Value", int, (-(2**53), 2**53))
_DOUBLE: Final = _Kind("google.protobuf.DoubleValue", float, (-1e300, 1e300))
_TIMES: Final = (_timestamp(b"0002-01-01 00:00:00+00"), _timestamp(b"9998-01-01 00:00:00+00"))
_KINDS: Final = {
    "bool": _Kind("google.protobuf.BoolValue", b"t".__eq__, (False, True)),
    **dict.fromkeys(("int2", "int4", "int8", "oid"), _INT),
    **dict.fromkeys(("float4", "float8"), _DOUBLE),
    "bytea": _Kind("google.protobuf.BytesValue", bytea_bytes, (b"", b"\xff")),
    "timestamptz": _Kind("google.protobuf.Timestamp", _timestamp, _TIMES),
    **dict.fromkeys(("json", "jsonb"), _Kind("dyn", json.loads)),
}


class Result(NamedTuple):
    """The type of a computed column in PostgreSQL, and the writer of its values' text form."""

    type_oid: int
    write: Callable[[Any], bytes]


def _written_text(value: str) -> bytes:
    if "\0" in value:
        raise ValueError("a zero byte")
    return value.encode("utf-8")


_TYPES: Final = {
    **{
        f"google.protobuf.{name}": said
        for name, said in (
            *(("BoolValue", "bool"), ("Int64Value", "int"), ("DoubleValue", "double")),
            *(("StringValue", "string"), ("BytesValue", "bytes"), ("Timestamp", "timestamp")),
        )
    },
    "dyn": "of any type",
}
"""How the documentation names the types that are declared to CEL."""
_UNDECLARED: Final = re.compile(r"undeclared reference to '([^']+)' \(in container ''\)")
_RESULTS: Final = {
    "BOOL": Result(16, lambda value: b"t" if value else b"f"),
    "INT": Result(20, lambda value: b"%d" % value),
    "DOUBLE": Result(
        701,
        lambda value: {"inf": b"Infinity", "-inf": b"-Infinity", "nan": b"NaN"}.get(
            repr(value), repr(value).encode()
        ),
    ),
    "STRING": Result(25, _written_text),
    "BYTES": Result(17, lambda value: b"\\x" + value.hex().encode("ascii")),
    "TIMESTAMP": Result(
        1184, lambda value: f"{value.astimezone(UTC):%Y-%m-%d %H:%M:%S.%f}+00".encode()
    ),
}


class Expression:
    """An expression over the columns of one relation. `key`: where the settings have it.

    `uses`: the columns that it names, as indexes of the relation's. Raise SettingsError for a text
    that is not an expression over them.
    """

    def __init__(self, text: str, key: str, relation: Relation) -> None:
        self.text = text
        self.key = key
        self._table = f"{relation.schema}.{relation.table}"
        kinds = {c.name: _kind_of(c.type_oid) for c in relation.columns if _named(text, c.name)}
        try:
            self.type, used = _checked(text, tuple(kinds.items()), key, self._table)
        except SettingsError as error:
            _name_unknown(error, text, [column.name for column in relation.columns])
            raise
        self.uses = [n for n, column in enumerate(relation.columns) if column.name in used]
        names = [relation.columns[index].name for index in self.uses]
        self._columns = [
            (index, said, kinds[name])
            for index, name in zip(self.uses, names, strict=True)
            for said in _names(name)
            if said in text and _declarable(said)
        ]
        self._typed = not _ANY_TYPE.search(text) and all(k.others for _, _, k in self._columns)
        """Whether nothing but NULL can have a wrong type."""
        self._compiled = _compiled(text, tuple(said for _, said, _ in self._columns))

    def value(self, row: Sequence[Value]) -> Any:
        """Return the value for a row, None for NULL. Raise ExpressionFailed where there is none.

        No column that the expression uses may be lacking in the row (Unchanged).
        """
        data: dict[str, Any] = {}
        nulls: dict[str, _Kind] = {}
        try:
            for index, name, kind in self._columns:
                value = row[index]
                if value is None:
                    nulls[name] = kind
                data[name] = None if value is None else kind.convert(value)  # type: ignore[arg-type]
        except (ValueError, OverflowError, RecursionError):
            raise self.failed(f"the value of {name} is outside of CEL's types") from None
        result, failure = self._evaluated(data)
        if not failure:
            return result
        if nulls and _may_be_of_null(failure):
            failure = "" if self._typed else self._failure_without(nulls, data)
            if not failure:
                return None
        raise self.failed(failure)

    def _evaluated(self, data: Mapping[str, Any]) -> tuple[Any, str]:
        """Return the value and "", or CEL's message of its failure."""
        try:
            found = self._compiled.eval(data=data)
        except RuntimeError as error:
            raise self.failed(str(error)) from None
        result = found.plain_value()
        return (None, str(result)) if found.type().name() == "ERROR" else (result, "")

    def _failure_without(self, nulls: Mapping[str, _Kind], data: Mapping[str, Any]) -> str:
        """Return the failure of a row that is not of its NULLs, "" where NULLs are the reason.

        The expression is checked: no value of a column's type has a wrong type in it. JSON may have
        any type, and is the reason only where it fails whatever stands for its NULLs.
        """
        of_json = _OTHER_JSON if any(kind.others is None for kind in nulls.values()) else (None,)
        for end in (0, 1):
            failures = []
            for other in of_json:
                others = {
                    n: kind.others[end] if kind.others else other for n, kind in nulls.items()
                }
                _, failure = self._evaluated({**data, **others})
                failures.append(failure)
                if _MARK in failure or not _WRONG_TYPE.search(failure):
                    break
            else:
                return failures[0]
        return ""

    def failed(self, reason: str) -> ExpressionFailed:
        """Return the error of a row for which there is no value; it quotes no value of the row."""
        return ExpressionFailed(self.key, self.text, re.split("['\"\n]", reason)[0].strip(" :"))

    def wrong(self, reason: str) -> SettingsError:
        """Return the error of an expression that does not fit its place."""
        return _wrong(self.text, self.key, self._table, reason)

    def result(self) -> Result:
        """Return how its values are published as a column. Raise SettingsError for other types."""
        found = _RESULTS.get(self.type)
        if found is None:
            raise self.wrong(
                f"its type is {self.type.lower()}, which no column has: convert it by string(), "
                "int(), double() or bool()"
            )
        return found


def _may_be_of_null(failure: str) -> bool:
    """Tell whether CEL's message is of a wrong type, which may be that of null."""
    wrong = _WRONG_TYPE.search(failure) is not None
    return wrong and (_NULL in failure or _WITHOUT_TYPES.search(failure) is not None)


def require_well_formed(text: str, key: str) -> None:
    """Raise SettingsError for a text that is not an expression, whatever the columns are."""
    _checked(text, (), key, "")


def _kind_of(type_oid: int) -> _Kind:
    found = built_in(type_oid)
    return _TEXT if found is None else _KINDS.get(found.name, _TEXT)


def _names(column: str) -> tuple[str, str]:
    """Return the two names of a column in an expression."""
    return column, f"row.{column}"


def _named(text: str, column: str) -> bool:
    """Tell whether an expression may name a column: the word is in it."""
    return bool(
        _IDENTIFIER.fullmatch(column) and re.search(rf"(?<![\w]){re.escape(column)}(?!\w)", text)
    )


def _checked(
    text: str, kinds: tuple[tuple[str, _Kind], ...], key: str, table: str
) -> tuple[str, frozenset[str]]:
    """Return the type of an expression, and which columns it uses. Raise SettingsError.

    Without a table, only its form is checked.
    """
    declared = {
        name: kind.declared
        for column, kind in kinds
        for name in _names(column)
        if _declarable(name)
    }
    try:
        expression = _environment(tuple(declared.items())).compile(text, disable_check=not table)
        used = {column for column, _ in kinds if not _stands_without(text, declared, column)}
    except RuntimeError as error:
        raise _wrong(text, key, table, _with_types(_reason(error), kinds)) from None
    return (expression.return_type().name() if table else ""), frozenset(used)


def _stands_without(text: str, declared: Mapping[str, str], column: str) -> bool:
    """Tell whether the expression compiles without the column, so does not use it."""
    rest = {name: kind for name, kind in declared.items() if name not in _names(column)}
    try:
        _environment(tuple(rest.items())).compile(text)
    except RuntimeError:
        return False
    return True


@lru_cache(4096)
def _declarable(name: str) -> bool:
    """Tell whether CEL does not have the name itself."""
    try:
        _environment(((name, "dyn"),)).compile("true")
    except RuntimeError:
        return False
    return True


def _compiled(text: str, names: tuple[str, ...]) -> Any:
    """Return an expression over columns whose values may be null, checked before."""
    return _environment(tuple((name, "dyn") for name in names)).compile(text)


@lru_cache(1024)
def _environment(declared: tuple[tuple[str, str], ...]) -> Any:
    """Return CEL with these variables (name, type), and its functions for strings and numbers."""
    try:
        from cel_expr_python import cel
        from cel_expr_python.ext import ext_math, ext_strings
    except ImportError:
        raise SettingsError(
            "expressions need a package that is not installed",
            operation="compile an expression",
            subject="shaping.filters, shaping.computed",
            hint="install slotbridge[expressions]: requirements/run.txt has its packages",
        ) from None
    return cel.NewEnv(
        variables={name: cel.Type(kind) for name, kind in declared},
        extensions=[ext_strings.ExtStrings(), ext_math.ExtMath()],
    )


def _reason(error: RuntimeError) -> str:
    """Return the first line of CEL's message, without its own error code."""
    lines = [line for line in str(error).splitlines() if "ERROR:" in line] or [str(error)]
    return lines[0].split("ERROR:")[-1].strip().removeprefix("<input>:").strip()


def _with_types(reason: str, kinds: tuple[tuple[str, _Kind], ...]) -> str:
    """Add to the reason of a wrong type which type each named column has in expressions."""
    if not kinds or "no matching overload" not in reason:
        return reason
    types = ", ".join(f"{column} is {_TYPES[kind.declared]}" for column, kind in kinds)
    return f"{reason}; in expressions {types}"


def _name_unknown(error: SettingsError, text: str, columns: Sequence[str]) -> None:
    """Say in the error of an unknown name that it is not a column, and which ones are near."""
    found = _UNDECLARED.search(error.message)
    if found is None or re.search(rf"(?<![\w.]){re.escape(found[1])}\s*\(", text):
        return  # of a function
    name = found[1].removeprefix("row.").partition(".")[0]
    if name in columns or re.search(rf"\.{re.escape(name)}\s*\(", text):
        return
    lowered = {column.lower(): column for column in columns}
    near = [lowered[one] for one in difflib.get_close_matches(name.lower(), lowered, n=3)]
    error.message = error.message.replace(found[0], f"the table does not have a column {name}")
    if near:
        error.hint = f"did you mean {' or '.join(near)}? {error.hint}"


def _wrong(text: str, key: str, table: str, reason: str) -> SettingsError:
    """Return the error of an expression, with a hint where it compares numbers of two types."""
    of_table = f" for {table}" if table else ""
    hint = f"correct {key}: docs/guides/shaping.md has the types of columns in expressions"
    if "no matching overload" in reason:
        hint = f"{hint}; a numeric is a string there, a double is compared with 10.0, not with 10, "
        hint += "as in: double(amount) > 10.0"
    return SettingsError(
        f"the expression {text!r} can't be used{of_table}: {reason}",
        operation="compile an expression",
        subject=key,
        hint=hint,
    )
