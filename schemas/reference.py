"""The settings described: key, type, default and meaning of each, read from their classes.

The example file of `slotbridge init`, docs/reference/settings.md and the chart's schema are made
from this, so that a key is described in one place: the string below its field.
"""

import ast
import functools
import inspect
import tempfile
import textwrap
import types
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final, Literal, NamedTuple

import yaml
from pydantic import BaseModel, SecretStr
from pydantic.fields import FieldInfo

from schemas.settings import Settings

TEMPORARY: Final = Path(tempfile.gettempdir())


class Key(NamedTuple):
    """One key of the settings. `path` has a name in capitals where the user chooses it."""

    path: str
    type: str
    default: str
    meaning: str
    required: bool
    depth: int
    section: bool


def keys(model: type[BaseModel] = Settings, prefix: str = "", depth: int = 0) -> Iterator[Key]:
    """Yield every key in the order of the classes, each section before its keys."""
    meanings = field_meanings(model)
    for name, field in model.model_fields.items():
        path = f"{prefix}{name}"
        nested, named = _nested(field.annotation)
        meaning = meanings.get(name, "")
        if nested is not None and not meaning:
            meaning = " ".join((inspect.getdoc(nested) or "").split("\n\n")[0].split())
        section = nested is not None and not named
        yield Key(
            path=path,
            type=_type_words(field.annotation),
            default="" if section else _default_text(field),
            meaning=meaning,
            required=field.is_required(),
            depth=depth,
            section=section,
        )
        if nested is not None:
            yield from keys(nested, f"{path}.NAME." if named else f"{path}.", depth + 1)


@functools.cache
def field_meanings(model: type[BaseModel]) -> dict[str, str]:
    """Return field -> the string below it in the source, of the class and those it inherits."""
    found: dict[str, str] = {}
    for owner in reversed(model.__mro__):
        if owner is BaseModel or not issubclass(owner, BaseModel):
            continue
        if not owner.__module__.startswith("schemas."):
            continue
        body = ast.parse(textwrap.dedent(inspect.getsource(owner))).body[0]
        assert isinstance(body, ast.ClassDef)
        for field, below in zip(body.body, body.body[1:], strict=False):
            if not isinstance(field, ast.AnnAssign) or not isinstance(field.target, ast.Name):
                continue
            if isinstance(below, ast.Expr) and isinstance(below.value, ast.Constant):
                found[field.target.id] = " ".join(str(below.value.value).split())
    return found


def _nested(annotation: Any) -> tuple[type[BaseModel] | None, bool]:
    """Return the model that a field holds, and whether it is kept under names or in a list."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation, False
    named = typing.get_origin(annotation) in (dict, tuple)
    for part in typing.get_args(annotation):
        model, deeper = _nested(part)
        if model is not None:
            return model, named or deeper
    return None, False


def _type_words(annotation: Any) -> str:
    """Return a setting's type in words."""
    origin, parts = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is typing.Annotated:
        return _type_words(parts[0])
    if origin is Literal:
        return " or ".join(f"`{part}`" for part in parts)
    if origin in (typing.Union, types.UnionType):
        return " or ".join(_type_words(part) for part in parts if part is not type(None))
    if origin is tuple:
        return f"list of {_type_words(parts[0])}"
    if origin is dict:
        return f"mapping of {_type_words(parts[1])}"
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return "section"
    words = {int: "whole number", float: "number", bool: "true or false", Path: "path"}
    return "secret text" if annotation is SecretStr else words.get(annotation, "text")


def default_of(field: FieldInfo) -> Any:
    """Return a field's default as YAML has it; None where there is none."""
    default = field.get_default(call_default_factory=True, validated_data={})
    if field.is_required() or default is None:
        return None
    if isinstance(default, SecretStr):
        return default.get_secret_value()
    if isinstance(default, BaseModel):
        return default.model_dump(mode="json")
    if isinstance(default, tuple):
        return list(default)
    return str(default) if isinstance(default, Path) else default


def _default_text(field: FieldInfo) -> str:
    if field.is_required():
        return ""
    if field.get_default(call_default_factory=True, validated_data={}) == TEMPORARY:
        return "the folder for temporary files"
    default = default_of(field)
    return yaml.safe_dump(default, default_flow_style=True, width=10_000).split("\n")[0]


def page() -> str:
    """Return the text of docs/reference/settings.md."""
    lines = [
        "# Configuration",
        "",
        "One YAML file serves all commands; each command reads its sections. Every key is also an",
        "environment variable, which overrides the file: `SLOTBRIDGE_SOURCE__SLOT` is for",
        "`source.slot`. `slotbridge init` writes a file to begin with; `slotbridge check-config`",
        "judges one.",
        "",
        "Made from the settings' classes by `make generate`; do not edit it. `NAME`",
        "in a key stands for a name that you choose.",
    ]
    for key in keys():
        if key.depth == 0:
            lines += ["", f"## {key.path}", "", key.meaning, ""]
            lines += ["| key | type | default | meaning |", "|---|---|---|---|"]
        else:
            default = "**required**" if key.required else _code(key.default)
            cells = (f"`{key.path}`", key.type, default, key.meaning)
            lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return "\n".join(lines) + "\n"


def _code(default: str) -> str:
    if default in ("", "null", "''"):
        return ""
    return default if default.startswith("the ") else f"`{default}`"
