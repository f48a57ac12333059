"""Chooses the encoder of a column by its type, its type modifier and the settings' modes. Pure.

A domain has its base type's form, an array is a JSON array of its elements' form. What is in no
table here is a string: PostgreSQL's text form (json, uuid, enums, ranges, networks, composites …).
A name alone says nothing: anybody may create a composite `money` or an enum `vector`. Built-in
types are known by oid, an extension's types by the extension that they belong to.
"""

from collections.abc import Callable, Iterable, Mapping
from json.encoder import encode_basestring as quoted
from typing import Final, NamedTuple

from schemas.events import UNAVAILABLE
from schemas.settings import ValueSettings
from services.bridge.events.values import datetimes, decimals, geometry, hstore, intervals, plain
from services.bridge.events.values.arrays import array
from services.bridge.events.values.plain import Encode
from services.bridge.pgoutput.type_names import PgType, built_in

Choose = Callable[[ValueSettings, int], Encode]
"""(settings, typmod) -> encoder."""

_CENTS_DIGITS: Final = 2
_TEXT_KINDS: Final = frozenset("cemr")
_TEXT_EXTENSIONS: Final = {
    "citext": "citext",
    **dict.fromkeys(("ltree", "lquery", "ltxtquery"), "ltree"),
    "cube": "cube",
    "seg": "seg",
    **dict.fromkeys(("isbn", "isbn13", "issn", "upc"), "isn"),
}
"""Type -> extension: types whose text form says all."""


class Encoder(NamedTuple):
    """How a column is written: its values, and one that the WAL lacks (JSON text)."""

    encode: Encode
    unavailable: str


class Encoders:
    """The encoders of one session. `learn` what `unknown` names before asking for their `of`.

    `money_digits`: how many digits money has after the decimal point in the database's locale.
    """

    def __init__(
        self, settings: ValueSettings | None = None, *, money_digits: int = _CENTS_DIGITS
    ) -> None:
        self.settings = settings or ValueSettings()
        self.money_digits = money_digits
        self._types: dict[int, PgType] = {}
        self._made: dict[tuple[int, int], Encoder] = {}

    def unknown(self, oids: Iterable[int]) -> set[int]:
        """Return the types of `oids` that are neither built in nor learned."""
        return {oid for oid in oids if oid not in self._types and built_in(oid) is None}

    def learn(self, pg_types: Iterable[PgType]) -> None:
        """Add types from the catalog. Types that it lacks stay unknown and are encoded as text."""
        self._types |= {kind.oid: kind for kind in pg_types}

    def base(self, oid: int, typmod: int) -> tuple[PgType | None, int]:
        """Resolve a domain to its base type and type modifier; other types are their own base."""
        found = self._type(oid)
        while found is not None and found.kind == "d":
            oid, typmod = found.base_oid, found.typmod if typmod < 0 else typmod
            found = self._type(oid)
        return found, typmod

    def understood(self, oid: int) -> bool:
        """Tell whether the encoders know this type, so that its values are not opaque text."""
        found, _ = self.base(oid, -1)
        if found is None:
            return False
        if found.element_oid:
            return self.understood(found.element_oid)
        return (
            built_in(found.oid) is not None
            or found.kind in _TEXT_KINDS
            or _is_of(found, _TEXT_EXTENSIONS)
            or self.structured(found)
        )

    @staticmethod
    def structured(pg_type: PgType) -> bool:
        """Tell whether `pg_type` is an extension's type that has an encoder of its own."""
        return _is_of(pg_type, _STRUCTURED_EXTENSIONS)

    def of(self, oid: int, typmod: int) -> Encoder:
        """Return the encoder of a column of type `oid`."""
        made = self._made.get((oid, typmod))
        if made is None:
            made = self._make(oid, typmod)
            if self._type(oid) is not None:
                self._made[oid, typmod] = made
        return made

    def binary(self, data: bytes) -> str:
        """Encode bytes that are not a column's in bytea's form."""
        return _BYTEA[self.settings.binary_handling](b"\\x" + data.hex().encode("ascii"))

    def _type(self, oid: int) -> PgType | None:
        return built_in(oid) or self._types.get(oid)

    def _make(self, oid: int, typmod: int) -> Encoder:
        """Return the encoder of a type; of types without one of their own, the text as a string."""
        found, typmod = self.base(oid, typmod)
        if found is None:
            return Encoder(plain.string, quoted(UNAVAILABLE))
        if found.element_oid:
            element = self._make(found.element_oid, typmod)
            encode = array(element.encode, found.delimiter.encode("ascii"))
            return Encoder(encode, f"[{element.unavailable}]")
        if built_in(found.oid) is not None:
            if found.name == "money":
                return Encoder(
                    decimals.money(self.settings.decimal_handling, self.money_digits),
                    quoted(UNAVAILABLE),
                )
            choose = _BUILT_IN.get(found.name)
        else:
            choose = _EXTENSIONS[found.name] if self.structured(found) else None
        if choose is None:
            return Encoder(plain.string, quoted(UNAVAILABLE))
        return Encoder(choose(self.settings, typmod), self._unavailable(found))

    def _unavailable(self, pg_type: PgType) -> str:
        """Return the placeholder of an unchanged value, in the form of the type's values."""
        if pg_type.name == "bytea" and self.settings.binary_handling != "hex":
            encode = _BYTEA[self.settings.binary_handling]
            return encode(b"\\x" + UNAVAILABLE.encode().hex().encode())
        if pg_type.name == "hstore" and self.settings.hstore_handling != "text":
            item = f'"{UNAVAILABLE}"=>"{UNAVAILABLE}"'.encode()
            return hstore.hstore(self.settings.hstore_handling)(item)
        if pg_type.name in ("vector", "halfvec"):
            return f"[{quoted(UNAVAILABLE)}]"
        return quoted(UNAVAILABLE)


def _is_of(pg_type: PgType, extensions: Mapping[str, str]) -> bool:
    """Tell whether `pg_type` is the base type that `extensions` (type -> extension) means."""
    owner = extensions.get(pg_type.name)
    return pg_type.kind == "b" and owner is not None and pg_type.extension == owner


def _always(encode: Encode) -> Choose:
    return lambda _settings, _typmod: encode


def _structured(encode: Encode) -> Choose:
    """Choose plain text, or with `structures: json` the encoder of a value that has parts."""
    return lambda settings, _typmod: encode if settings.structures == "json" else plain.string


def _bits(settings: ValueSettings, typmod: int) -> Encode:
    if settings.structures == "text":
        return plain.string
    return plain.bit if typmod == 1 else plain.bits


_BYTEA: Final[dict[str, Encode]] = {
    "base64": plain.bytea_base64,
    "base64-url-safe": plain.bytea_base64_url_safe,
    "hex": plain.bytea_hex,
}
_BUILT_IN: Final[dict[str, Choose]] = {
    "bool": _always(plain.boolean),
    **dict.fromkeys(("int2", "int4", "int8", "oid"), _always(plain.integer)),
    **dict.fromkeys(("float4", "float8"), _always(plain.floating)),
    "numeric": lambda s, typmod: decimals.numeric(s.decimal_handling, typmod),
    "bit": _bits,
    "varbit": _bits,
    "bytea": lambda s, _: _BYTEA[s.binary_handling],
    "date": lambda s, _: datetimes.date(s.time_precision),
    "time": lambda s, typmod: datetimes.time(s.time_precision, typmod),
    "timestamp": lambda s, typmod: datetimes.timestamp(s.time_precision, typmod),
    "timestamptz": lambda _, typmod: datetimes.timestamptz(typmod),
    "timetz": _always(datetimes.timetz),
    "interval": lambda s, _: intervals.interval(s.interval_handling),
    "point": _structured(geometry.point),
    "line": _structured(geometry.line),
    "lseg": _structured(geometry.lseg),
    "path": _structured(geometry.path),
    "box": _structured(geometry.box),
    "polygon": _structured(geometry.polygon),
    "circle": _structured(geometry.circle),
}
_EXTENSIONS: Final[dict[str, Choose]] = {
    "hstore": lambda s, _: hstore.hstore(s.hstore_handling),
    "vector": _always(geometry.vector),
    "halfvec": _always(geometry.vector),
    "sparsevec": _structured(geometry.sparse_vector),
    "geometry": _structured(geometry.extended_wkb),
    "geography": _structured(geometry.extended_wkb),
}
_STRUCTURED_EXTENSIONS: Final = {
    "hstore": "hstore",
    **dict.fromkeys(("vector", "halfvec", "sparsevec"), "vector"),
    **dict.fromkeys(("geometry", "geography"), "postgis"),
}
"""Type of _EXTENSIONS -> the extension that brings it."""
