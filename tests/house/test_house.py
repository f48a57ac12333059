"""The figures of `make house`: what is counted, by small inputs, and that all of them are there."""

import ast

from tools import house


def test_rooms_arrows_and_floors_are_counted() -> None:
    trees = {
        "s/a/one.py": ast.parse("from s.b.two import f\nimport s.c"),
        "s/b/two.py": ast.parse("import os\nfrom s.c.three import g"),
        "s/c/three.py": ast.parse(""),
    }
    assert house.rooms(trees, "s") == {"rooms": 3, "floors": 3, "arrows": 3}
    trees["s/c/three.py"] = ast.parse("import s.a.one")
    assert house.rooms(trees, "s") == {"rooms": 3, "floors": None, "arrows": 4}


def test_every_figure_is_there() -> None:
    measured = house.figures()
    assert measured["lines"]["product"] > 10_000
    assert all(value > 0 for value in measured["to know"].values())
    assert "README.md" in measured["words a sentence, sentences over 35"]
