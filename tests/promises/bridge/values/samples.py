"""Values of every type: type -> text forms, of which the n-th is in the n-th row of a table."""

from collections.abc import Mapping
from typing import Final

SETUP: Final = """
    CREATE EXTENSION hstore; CREATE EXTENSION citext; CREATE EXTENSION ltree;
    CREATE EXTENSION vector;
    CREATE TYPE mood AS ENUM ('sad', 'ha ppy', 'a"b,c');
    CREATE TYPE pair AS (i int, t text);
    CREATE DOMAIN positive AS int CHECK (VALUE > 0);
    CREATE DOMAIN smaller AS positive;
    CREATE DOMAIN price AS numeric(8, 3);
    CREATE DOMAIN stamp AS timestamp(3);
    CREATE DOMAIN ints AS int[];
    CREATE DOMAIN feeling AS mood;
"""
SCALARS: Final[dict[str, tuple[str, ...]]] = {
    "bool": ("t", "f"),
    "bit(1)": ("1", "0"),
    "bit(12)": ("000000000101", "111111111111", "100000000000", "000000000000"),
    "varbit": ("", "1", "1010101010101", "0001"),
    "varbit(1)": ("1", "0", ""),
    "varbit(20)": ("101", "0", "1" * 20),
    "bit(64)": ("1" * 64, "0" * 63 + "1"),
    "int2": ("-32768", "32767"),
    "int4": ("-2147483648", "2147483647"),
    "int8": ("-9223372036854775808", "9223372036854775807"),
    "oid": ("4294967295", "0"),
    "float4": ("1.5", "3.4028235e38", "NaN", "Infinity", "-Infinity", "-0", "0.1", "1e-45"),
    "float8": ("1.5", "1.7976931348623157e308", "5e-324", "NaN", "-Infinity", "0.1", "1e15"),
    "numeric(10,2)": ("123.45", "-99999999.99", "0", "0.05", "-0.01", "1.28", "-1.28"),
    "numeric(5,0)": ("12345", "-1"),
    "numeric(3,5)": ("0.00123",),
    "numeric(5,-2)": ("1200", "-100"),
    "numeric(38,10)": ("1234567890123456789012345678.0123456789",),
    "numeric": ("1.50", "-123456789012345678901234567890.123456789", "0", "1e20", "1e-20", "0.000"),
    "money": ("12.34", "-92233720368547758.08", "0", "1234567.8"),
    "date": (
        *("2024-02-29", "1970-01-01", "infinity", "-infinity", "5874897-12-31", "4713-01-01 BC"),
        *("0044-03-15 BC", "10000-01-01"),
    ),
    "time": ("10:20:30.123456", "00:00", "24:00", "23:59:59.999999"),
    "time(0)": ("10:20:30",),
    "time(3)": ("10:20:30.12", "24:00"),
    "timestamp": (
        *("2024-02-29 10:20:30.123456", "infinity", "-infinity", "1969-12-31 23:59:59.999999"),
        *("0001-01-01 00:00", "4713-01-01 00:00 BC", "10000-01-01 00:00"),
        "294276-12-31 23:59:59.999999",
    ),
    "timestamp(0)": ("2024-02-29 10:20:31", "infinity"),
    "timestamp(3)": (
        *("2024-02-29 10:20:30.123", "infinity", "-infinity", "4713-01-01 00:00 BC"),
        *("1969-12-31 23:59:59.999", "294276-12-31 23:59:59.999"),
    ),
    "timestamptz": (
        *("2024-02-29 10:20:30.123456+02", "2024-02-29 10:20:30+00", "2024-02-29 10:20:30.1+00"),
        *("infinity", "-infinity", "0044-03-15 12:00:00+00 BC", "0001-12-31 00:00+00 BC"),
        *("12345-06-07 08:09:10.123456+00", "294276-12-31 23:59:59.999999+00"),
    ),
    "timestamptz(0)": ("2024-02-29 10:20:30+00", "infinity"),
    "timestamptz(3)": ("2024-02-29 10:20:30.12+00", "2024-02-29 10:20:30+00"),
    "timetz": (
        *("10:20:30.5+02", "10:20:00+00", "24:00+00", "24:00-01", "00:00+15:59"),
        *("10:20:30.123456-05:30", "10:20:30+02:03:04"),
    ),
    "interval": (
        *("1 year 2 mons -3 days 04:05:06.789", "0", "-1 mon", "178000000 years"),
        *("00:00:00.000001", "-01:02:03.5", "100:00:00", "infinity", "-infinity"),
    ),
    "bytea": ("\\x", "\\x00ff80", "\\xfbff"),
    "json": ('{"a":  1}', "[]", "null"),
    "jsonb": ('{"a": [1, null]}', '"x"'),
    "uuid": ("a0eebc99-9c0b-4ef8-bb6d-6bb9bd380a11",),
    "mood": ("sad", "ha ppy", 'a"b,c'),
    "int4range": ("[1,5)", "empty", "(,)"),
    "int8range": ("[1,5)",),
    "numrange": ("(1.5,2]",),
    "tsrange": ("[2024-01-01 00:00,infinity)",),
    "tstzrange": ("[2024-01-01 00:00+00,)",),
    "daterange": ("[2024-01-01,2024-02-01)",),
    "int4multirange": ("{[1,5),[7,8)}",),
    "inet": ("10.0.0.1/8", "::1"),
    "cidr": ("10.0.0.0/8",),
    "macaddr": ("08:00:2b:01:02:03",),
    "macaddr8": ("08:00:2b:01:02:03:04:05",),
    "citext": ("Ab",),
    "ltree": ("a.b.c",),
    "tsvector": ("a:1 b:2A",),
    "tsquery": ("a & b",),
    "pg_lsn": ("16/B374D848",),
    "name": ("nm",),
    '"char"': ("x",),
    "char(5)": ("ab",),
    "varchar(3)": ("äöü", ""),
    "text": ('é💡\x01\x02"\\\n\t\u2028\ufffe', ""),
    "hstore": ('"a"=>"1","b"=>NULL,"c d"=>"x\\"y\\\\z"', '"a b"=>"c"', ""),
    "point": ("(1.5,-2)", "(1e300,0.1)"),
    "line": ("{1,2,3}",),
    "lseg": ("[(1,2),(3,4)]",),
    "box": ("(3,4),(1,2)",),
    "path": ("[(1,2),(3,4)]", "((1,2),(3,4))"),
    "polygon": ("((1,2),(3,4),(5,6))", "((1,2),(3,4),(1,2))"),
    "circle": ("<(1,2),3>",),
    "vector(3)": ("[1,2.5,-3]",),
    "halfvec(3)": ("[1,2.5,-3]",),
    "sparsevec(5)": ("{1:1.5,3:2}/5",),
    "pair": ('(1,"a b")',),
    "positive": ("7",),
    "smaller": ("9",),
    "price": ("1.50", "-3"),
    "stamp": ("2024-02-29 10:20:30.123",),
    "ints": ("{1,2}",),
    "feeling": ("sad",),
    "xid8": ("5",),
    "jsonpath": ('$."a"',),
    "int2vector": ("1 2",),
    "regclass": ("pg_class",),
}
ARRAYS: Final[dict[str, tuple[str, ...]]] = {
    "bool[]": ("{t,f,NULL}",),
    "int2[]": ("{1,NULL}",),
    "int4[]": ("{1,NULL}", "{}", "[0:1]={5,6}", "{{1,2},{3,4}}"),
    "int8[]": ("{9223372036854775807}",),
    "oid[]": ("{1}",),
    "float4[]": ("{1.5,NULL}", "{NaN,Infinity}"),
    "float8[]": ("{0.1,NULL}",),
    "numeric[]": ("{1.50,NULL,100}",),
    "numeric(10,2)[]": ("{1.50,NULL}",),
    "money[]": ("{1.50}",),
    "text[]": ('{"x y",NULL,"","a\\"b\\\\c","NULL",é}', "{{a,b},{c,d}}"),
    "varchar(5)[]": ("{ab,NULL}",),
    "char(5)[]": ("{ab}",),
    '"char"[]': ("{a}",),
    "name[]": ("{n}",),
    "date[]": ("{2024-02-29,NULL}", "{infinity}", "{0044-03-15 BC}"),
    "time[]": ("{10:20:30.123,NULL}", "{10:20:30.123456}"),
    "time(3)[]": ("{10:20:30.123}",),
    "timetz[]": ("{10:20:30+02}",),
    "timestamp[]": ("{2024-02-29 10:20:30.123456,NULL}", "{infinity}"),
    "timestamp(3)[]": ("{2024-02-29 10:20:30.123}",),
    "timestamptz[]": ("{2024-02-29 10:20:30.5+02}", "{infinity}"),
    "interval[]": ("{1 day}",),
    "bytea[]": ('{"\\\\x00ff",NULL}',),
    "json[]": ('{"{\\"a\\": 1}",NULL}',),
    "jsonb[]": ('{"[1]"}',),
    "uuid[]": ("{a0eebc99-9c0b-4ef8-bb6d-6bb9bd380a11}",),
    "mood[]": ('{sad,NULL,"ha ppy"}',),
    "bit(8)[]": ("{00000001}",),
    "varbit[]": ("{101}",),
    "inet[]": ("{10.0.0.1/8}",),
    "cidr[]": ("{10.0.0.0/8}",),
    "macaddr[]": ("{08:00:2b:01:02:03}",),
    "int4range[]": ('{"[1,5)"}',),
    "numrange[]": ('{"[1,5)"}',),
    "tsrange[]": ('{"[2024-01-01 00:00,infinity)"}',),
    "int4multirange[]": ('{"{[1,5)}"}',),
    "citext[]": ("{Ab}",),
    "ltree[]": ("{a.b,c}",),
    "hstore[]": ('{"\\"a\\"=>\\"1\\""}',),
    "point[]": ('{"(1,2)"}',),
    "box[]": ("{(3,4),(1,2)}",),
    "positive[]": ("{7}",),
    "pair[]": ('{"(1,a)"}',),
    "tsvector[]": ("{a}",),
    "vector(3)[]": ('{"[1,2,3]"}',),
}
SPECIAL: Final[dict[str, tuple[str, ...]]] = {
    "numeric": ("NaN", "Infinity", "-Infinity"),
    "numeric(10,2)": ("NaN",),
}
"""What `decimal.handling.mode=precise` makes Debezium fail on."""


def rows(samples: Mapping[str, tuple[str | None, ...]]) -> list[list[str | None]]:
    """The table that has them all, column by type; NULL below a column's last value, and a last row
    of NULLs."""
    height = max(map(len, samples.values())) + 1
    return [
        [texts[place] if place < len(texts) else None for texts in samples.values()]
        for place in range(height)
    ]
