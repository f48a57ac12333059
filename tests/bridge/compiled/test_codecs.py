"""Compiled Avro and Protobuf: byte for byte as the libraries have it, or left to them.

That ordinary rows are not left to them: test_transcoded_rows.py.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.bridge import compiled
from services.bridge.events.formats import avro, connect, protobuf
from tests.bridge.conftest import COMPILED
from tests.promises.bridge.strategies import names
from tests.promises.bridge.values.connect_schemas import as_text, documents, schemas

pytestmark = COMPILED
Serializer = Callable[[connect.Schema, int], Callable[[str], bytes]]
SERIALIZERS = {"avro": avro.serializer, "protobuf": protobuf.serializer}


@contextmanager
def without_compiled() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compiled, "engine", None)
        yield


def both(form: str, schema: connect.Schema) -> tuple[Any, Callable[[str], bytes]]:
    """The transcoder of a schema, and what the library alone makes of it."""
    made = SERIALIZERS[form](schema, 7)
    with without_compiled():
        return made, SERIALIZERS[form](schema, 7)


@given(st.data(), st.sampled_from(sorted(SERIALIZERS)), schemas(), st.booleans())
def test_a_document_that_fits_becomes_the_librarys_bytes(
    data: st.DataObject, form: str, schema: connect.Schema, ascii_only: bool
) -> None:
    made, by_library = both(form, schema)
    for _ in range(3):  # in another order of the fields
        text = as_text(data.draw(documents(schema)), ascii_only=ascii_only)
        assert made(text) == by_library(text)
        assert made.transcode(text.encode()) == by_library(text)
    assert made.declined == 0


def outcome(serialize: Callable[[str], bytes], text: str) -> object:
    try:
        return serialize(text)
    except Exception as error:  # whatever the library raises
        return type(error)


def changed(data: st.DataObject, document: Any) -> Any:
    """A document that is changed in one place, so that it may not fit."""
    other = st.sampled_from(
        [
            *(
                None,
                True,
                0,
                -1,
                2**31,
                2**63,
                -(2**63) - 1,
                1.5,
                1e300,
                10**400,
                "",
                "NaN",
                "A===",
            ),
            *("AAA=", "QQ", "Q Q=", "é", "\ud800", [], [None], {}, {"x": 1}, [[1, 2]], [[1]]),
        ]
    )
    if isinstance(document, dict) and document and data.draw(st.booleans()):
        name = data.draw(st.sampled_from(sorted(document)))
        rest = {key: value for key, value in document.items() if key != name}
        kind = data.draw(st.sampled_from(["drop", "rename", "within", "within"]))
        if kind == "drop":
            return rest
        if kind == "rename":
            return {**rest, data.draw(names): document[name]}
        return {**rest, name: changed(data, document[name])}
    if isinstance(document, list) and document and data.draw(st.booleans()):
        at = data.draw(st.integers(0, len(document) - 1))
        return [*document[:at], changed(data, document[at]), *document[at + 1 :]]
    return data.draw(other)


@given(st.data(), st.sampled_from(sorted(SERIALIZERS)), schemas(), st.booleans())
def test_a_document_that_does_not_fit_is_as_the_library_has_it(
    data: st.DataObject, form: str, schema: connect.Schema, ascii_only: bool
) -> None:
    made, by_library = both(form, schema)
    document = data.draw(documents(schema))
    text = as_text(changed(data, document), ascii_only=ascii_only)
    assert outcome(made, text) == outcome(by_library, text)


@st.composite
def mutated(draw: st.DrawFn, text: bytes) -> bytes:
    """A text that is cut, or has other bytes in some places."""
    found = bytearray(text)
    for _ in range(draw(st.integers(1, 3))):
        at = draw(st.integers(0, len(found)))
        kind = draw(st.integers(0, 3))
        if kind == 0:
            del found[at:]
        elif kind == 1:
            del found[at : at + draw(st.integers(1, 9))]
        else:
            part = draw(
                st.binary(max_size=3)
                | st.sampled_from([b'"', b"\\", b"\\u", b"\\ud83d", b"{", b"}", b"[", b"]", b","])
                | st.sampled_from([b":", b"0", b"-", b".", b"e", b"null", b"true", b" ", b"="])
            )
            found[at : at + (len(part) if kind == 2 else 0)] = part
    return bytes(found)


@given(st.data(), st.sampled_from(sorted(SERIALIZERS)), schemas())
def test_a_garbled_text_gives_no_other_bytes_than_the_librarys(
    data: st.DataObject, form: str, schema: connect.Schema
) -> None:
    made, by_library = both(form, schema)
    whole = as_text(data.draw(documents(schema))).encode()
    for _ in range(5):
        text = data.draw(mutated(whole))
        found = made.transcode(text)
        if found is not None:
            try:
                readable = text.decode()
            except UnicodeDecodeError:
                continue
            assert found == by_library(readable)
    for end in range(min(len(whole), 300)):
        assert made.transcode(whole[:end]) is None


def one(field: connect.Schema) -> connect.Schema:
    return connect.key("b.s.t", {"a": field})


def taken(form: str, field: connect.Schema, value: str) -> bytes | None:
    """What a transcoder makes of a field's JSON; it is the library's if it is anything."""
    made, by_library = both(form, one(field))
    text = f'{{"a":{value}}}'
    found: bytes | None = made.transcode(text.encode())
    assert found is None or found == by_library(text)
    return found


@pytest.mark.parametrize("form", sorted(SERIALIZERS))
@pytest.mark.parametrize(
    ("kind", "good", "bad"),
    [
        (
            "double",
            [
                "0",
                "-0",
                "-0.0",
                "-0e5",
                "1e22",
                "1e23",
                "0.1",
                "123456789012345678",
                "1E+2",
                "1e-7",
                "9007199254740993",
                "9007199254740993.0",
                "2.2250738585072011e-308",
                "4.35e+300",
                "179769313486231570000000000000",
                "8.5e-324",
                '"NaN"',
                '"-Infinity"',
            ],
            [
                "",
                "-",
                ".5",
                "5.",
                "01",
                "-01",
                "1e",
                "1e+",
                "+1",
                "1e999",
                "Infinity",
                "NaN",
                "true",
                '"1.5"',
                '"nan"',
                "1_0",
                "null x",
                "0x1p3",
                "1" * 70,
                "1e00001",
                " 1",
            ],
        ),
        ("float", ["3.4028235e38", "1e-45", "0.1", '"Infinity"'], ["1e39", "-3.5e38", "true"]),
        (
            "int64",
            ["0", "9223372036854775807", "-9223372036854775808", "-1"],
            [
                "-0",
                "9223372036854775808",
                "-9223372036854775809",
                "18446744073709551616",
                "00",
                "-",
                "",
                "1.0",
                "1e2",
                "true",
                '"1"',
                "99999999999999999999",
                "-00",
            ],
        ),
        ("int16", ["2147483647", "-2147483648"], ["2147483648", "-2147483649"]),
        ("boolean", ["true", "false"], ["1", "tru", "True", "truex", '"true"', "0"]),
        (
            "string",
            [
                '""',
                '"\\u0000"',
                '"\\ud83d\\ude00"',
                '"\\uD83D\\uDE00"',
                '"\\/\\"\\\\"',
                '"\\u00e9"',
                '"\x7f"',
                '"é"',
                '"12345678\\n12345678"',
            ],
            [
                '"\\ud83d"',
                '"\\ude00"',
                '"\\ud83d\\u0041"',
                '"\\ud83dx"',
                '"\\u12"',
                '"\\x"',
                '"\n"',
                '"',
                '"a',
                '"a\\',
                '"\\u',
                "1",
                "a",
                "'a'",
                '"\t12345678"',
                '"\\ud83d\\n"',
                '"\\u+123"',
            ],
        ),
        (
            "bytes",
            ['""', '"AA=="', '"AAA="', '"AAAA"', '"QR=="', '"+/+/"'],
            [
                '"A"',
                '"AA"',
                '"AAA"',
                '"AA="',
                '"AAA=="',
                '"===="',
                '"AA==AAAA"',
                '"A-_A"',
                '"AA\\/A"',
                '"AAAAA==="',
                '"AAAA',
                "1",
                '"A\\u0041=="',
                '"AA== "',
                '"é==="',
            ],
        ),
    ],
)
def test_values_that_are_taken_and_values_that_are_left_to_the_library(
    form: str, kind: str, good: Sequence[str], bad: Sequence[str]
) -> None:
    for optional in (True, False):
        field = connect.plain(kind, optional=optional)
        assert [value for value in good if taken(form, field, value) is None] == []
        assert [value for value in bad if taken(form, field, value) is not None] == []
        assert (taken(form, field, "null") is not None) == optional


@pytest.mark.parametrize("form", sorted(SERIALIZERS))
def test_a_map_whose_keys_are_not_in_hstores_order_is_left_to_the_library(form: str) -> None:
    assert taken(form, connect.HSTORE_MAP, '{"":null,"b":"1","aa":"2"}') is not None
    for keys in ('{"b":"1","a":"2"}', '{"a":"1","a":"2"}', '{"aa":"1","b":"2"}', '{"":"1","":"2"}'):
        assert taken(form, connect.HSTORE_MAP, keys) is None
    assert taken(form, connect.HSTORE_MAP, '{"a":"' + "x" * 300 + '","b":null}') is not None


@pytest.mark.parametrize("form", sorted(SERIALIZERS))
@pytest.mark.parametrize(
    "text",
    [
        '{"a":1,"a":2}',
        '{"b":1}',
        '{"a":1,"b":2}',
        '{"a" :1}',
        ' {"a":1}',
        '{"a":1} ',
        '{"a":1}x',
        '{"a":1,}',
        "{,}",
        "[]",
        "null",
        "",
        "{",
        '{"a"',
        '{"\\u0061":1}',
        '{"a":1',
    ],
)
def test_a_struct_that_is_not_as_the_bridge_writes_it_is_left_to_the_library(
    form: str, text: str
) -> None:
    made, _ = both(form, one(connect.plain("int64")))
    assert made.transcode(text.encode()) is None
    found = made.transcode(b'{"a":null}')
    assert found is not None and made.transcode(b"{}") == found


@pytest.mark.parametrize("form", sorted(SERIALIZERS))
def test_what_is_left_to_the_library_is_counted_and_large_values_leave_no_large_buffer(
    form: str,
) -> None:
    made, by_library = both(form, one(connect.STRING))
    for size in (5_000_000, 10, 1_000_000, 0):
        text = as_text({"a": "x" * size + "\n"})
        assert made(text) == by_library(text)
    assert made.declined == 0
    text = '{ "a": "x" }'
    assert made(text) == by_library(text)
    assert made.declined == 1
    surrogate = '{"a":"\ud800"}'
    assert outcome(made, surrogate) == outcome(by_library, surrogate)
