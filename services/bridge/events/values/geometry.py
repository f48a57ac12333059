"""Geometric types, PostGIS and pgvector to JSON text. Pure.

    point                    {"x", "y", "wkb", "srid": null}
    lseg path box polygon    {"wkb", "srid": null, "extensions": {"type"[, "closed"]}}
    circle                   {"center": point, "radius"}
    line                     {"a", "b", "c"}
    geometry, geography      {"wkb": extended WKB, "srid"}
    vector, halfvec          [1, 2.5]
    sparsevec                {"dimensions": 5, "vector": [[1, 1.5], [3, 2]]}

wkb is little-endian well-known binary in base64, a box or polygon being one closed ring.
Source: OGC 06-103r4 section 8.2; postgis/postgis doc/ZMSgeoms.txt for the extended form.
"""

import re
import struct
from typing import Final

from services.bridge.events.values.plain import floating, quoted_base64

_NUMBER: Final = re.compile(rb"-?(?:\d[\d.]*(?:e[+-]?\d+)?|Infinity)|NaN")
_VECTOR: Final = re.compile(rb"\[[-+.,\deINafinty]*\]")
_SPARSE: Final = re.compile(rb"\{((?:\d+:[^,:{}]+(?:,(?=\d)|(?=\})))*)\}/(\d+)")
_POINT, _LINE_STRING, _POLYGON = 1, 2, 3
_SRID_FLAG: Final = 0x20000000
_EWKB_BYTES_MIN: Final = 9

Point = tuple[bytes, bytes]


def point(value: bytes) -> str:
    """Encode a point, `(x,y)`."""
    (only,) = _points(value, 1)
    return _point(only)


def line(value: bytes) -> str:
    """Encode a line {A,B,C}, which means Ax + By + C = 0."""
    a, b, c = _numbers(value)
    return f'{{"a":{floating(a)},"b":{floating(b)},"c":{floating(c)}}}'


def lseg(value: bytes) -> str:
    """Encode an lseg, `[(x1,y1),(x2,y2)]`."""
    return _shape(_line_string(_points(value, 2)), '"type":"lseg"')


def path(value: bytes) -> str:
    """Encode a path: [(x1,y1),…] is open, ((x1,y1),…) closed."""
    closed = "false" if value[:1] == b"[" else "true"
    return _shape(_line_string(_points(value)), f'"type":"path","closed":"{closed}"')


def box(value: bytes) -> str:
    """Encode a box, `(x1,y1),(x2,y2)`."""
    (x1, y1), (x2, y2) = _points(value, 2)
    ring = [(x1, y1), (x1, y2), (x2, y2), (x2, y1), (x1, y1)]
    return _shape(_polygon(ring), '"type":"box"')


def polygon(value: bytes) -> str:
    """Encode a polygon, `((x1,y1),…)`."""
    ring = _points(value)
    if len(ring) > 1 and ring[0] != ring[-1]:
        ring.append(ring[0])
    return _shape(_polygon(ring), '"type":"polygon"')


def circle(value: bytes) -> str:
    """Encode a circle, `<(x,y),r>`."""
    x, y, radius = _numbers(value)
    return f'{{"center":{_point((x, y))},"radius":{floating(radius)}}}'


def extended_wkb(value: bytes) -> str:
    """Encode PostGIS's extended WKB, given in hexadecimal."""
    data = bytes.fromhex(value.decode("ascii"))
    if len(data) < _EWKB_BYTES_MIN:
        raise ValueError("no geometry")
    order = "<" if data[0] else ">"
    kind, srid = struct.unpack_from(f"{order}Ii", data, 1)
    return f'{{"wkb":{quoted_base64(data)},"srid":{srid if kind & _SRID_FLAG else "null"}}}'


def vector(value: bytes) -> str:
    """Return a vector like [1,2.5] unchanged: it is a JSON array."""
    if not _VECTOR.fullmatch(value):
        raise ValueError("no vector")
    return value.decode("ascii")


def sparse_vector(value: bytes) -> str:
    """Encode {1:1.5,3:2}/5, the index and element of what is not 0; the first index is 1."""
    match = _SPARSE.fullmatch(value)
    if match is None:
        raise ValueError("no sparse vector")
    elements = (part.split(b":") for part in match[1].split(b",") if part)
    pairs = ",".join(f"[{int(index)},{floating(element)}]" for index, element in elements)
    return f'{{"dimensions":{int(match[2])},"vector":[{pairs}]}}'


def _point(point: Point) -> str:
    x, y = point
    wkb = quoted_base64(_wkb(_POINT) + _coordinates([point]))
    return f'{{"x":{floating(x)},"y":{floating(y)},"wkb":{wkb},"srid":null}}'


def _shape(wkb: bytes, extensions: str) -> str:
    return f'{{"wkb":{quoted_base64(wkb)},"srid":null,"extensions":{{{extensions}}}}}'


def _line_string(points: list[Point]) -> bytes:
    return _wkb(_LINE_STRING) + struct.pack("<I", len(points)) + _coordinates(points)


def _polygon(ring: list[Point]) -> bytes:
    return _wkb(_POLYGON) + struct.pack("<II", 1, len(ring)) + _coordinates(ring)


def _wkb(kind: int) -> bytes:
    return struct.pack("<BI", 1, kind)


def _coordinates(points: list[Point]) -> bytes:
    return b"".join(struct.pack("<dd", float(x), float(y)) for x, y in points)


def _numbers(value: bytes) -> list[bytes]:
    return _NUMBER.findall(value)


def _points(value: bytes, count: int | None = None) -> list[Point]:
    numbers = _numbers(value)
    points = list(zip(numbers[::2], numbers[1::2], strict=True))
    if not points or (count is not None and len(points) != count):
        raise ValueError("wrong number of points")
    return points
