"""HTML and SVG as trees, so that every text and attribute is escaped by whoever prints them. Pure.

    el("p", "5 < 6", el("b", name), class_="note")  ->  <p class="note">5 &lt; 6<b>…</b></p>

Source: Python documentation, xml.etree.ElementTree (tostring, method="html").
"""

from collections.abc import Iterable
from xml.etree.ElementTree import Element, tostring

Child = Element | str | None
_UNPRINTABLE = {
    number: "\N{REPLACEMENT CHARACTER}" for number in range(32) if number not in (9, 10)
}


def el(tag: str, *children: Child, **attributes: object) -> Element:
    """Make an element; `class_` is class, `a_b` the attribute a-b; leave out None and False."""
    element = Element(tag)
    for name, value in attributes.items():
        if value is not None and value is not False:
            element.set(_attribute(name), "" if value is True else _clean(str(value)))
    last: Element | None = None
    for child in children:
        if isinstance(child, Element):
            element.append(child)
            last = child
        elif child is not None and last is None:
            element.text = (element.text or "") + _clean(child)
        elif child is not None and last is not None:
            last.tail = (last.tail or "") + _clean(child)
    return element


def document(root: Element) -> str:
    """Return the whole page as HTML text."""
    return "<!doctype html>\n" + tostring(root, encoding="unicode", method="html")


def table(heads: Iterable[str], rows: Iterable[Iterable[Child]], **attributes: object) -> Element:
    """Make a table; each cell names its column, for windows in which rows become blocks."""
    names = list(heads)
    lines = [
        el("tr", *(el("td", cell, data_label=n) for n, cell in zip(names, row, strict=True)))
        for row in rows
    ]
    head = el("thead", el("tr", *(el("th", name, scope="col") for name in names)))
    return el("table", head, el("tbody", *lines), **attributes)


def _attribute(name: str) -> str:
    return name.rstrip("_").replace("_", "-") if name != "viewBox" else name


def _clean(text: str) -> str:
    return text.translate(_UNPRINTABLE).encode("utf-8", "replace").decode("utf-8")
