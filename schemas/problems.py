"""A validation error of the settings in words for the person who wrote the file.

Unknown keys come first: a mistyped key is what makes the right one seem to be missing. Values are
never repeated, because any of them may be a secret.
"""

import difflib
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final, NamedTuple

import yaml
from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from schemas.errors import SettingsError

SHOWN_MAX: Final = 20
_OPERATION: Final = "read settings"
_LOWERCASE_NAME: Final = r"^[a-z0-9_]{1,40}$"
_WORDS_FOR_PATTERN: Final = {
    _LOWERCASE_NAME: "must be 1 to 40 lower-case letters, digits or underscores, such as `bank_1`",
    r"^[A-Za-z0-9._-]{1,100}$": "must be 1 to 100 letters, digits, dots, underscores or hyphens",
    r"^[a-zA-Z0-9._-]{1,249}$": "must be a topic: 1 to 249 letters, digits, dots, `_` or hyphens",
    r"^([a-z0-9]([a-z0-9.-]*[a-z0-9])?)?$": "must be lower-case letters, digits, dots or hyphens",
    r"^(https?://[^/\s@]+/?)?$": "must be http://HOST:PORT or https://HOST:PORT, without a path",
    r"^https?://[^\s@,]+$": "must be one URL, https://HOST:PORT, without a user in it",
    r"^(s3://[a-z0-9][a-z0-9.-]{2,62}(/[^\s/]+)*|file:///\S+)/?$": "must be s3://BUCKET/PREFIX or "
    "file:///FOLDER",
    r"^[^:]*$": "must not have a colon",
    r"^[A-Za-z0-9_]*$": "must be letters, digits or underscores",
    r"^[0-9]+[mg]$": "must be a number with m or g behind it, such as 2g",
}
_WORDS_FOR_TYPE: Final = {
    "missing": "is missing",
    "bool_parsing": "must be true or false",
    "bool_type": "must be true or false",
    "string_type": "must be text; put it in quotes",
    "path_type": "must be the path of a file or folder",
    "dict_type": "must be a mapping: keys with values, indented below it",
    "model_type": "must be a mapping: keys with values, indented below it",
    "model_attributes_type": "must be a mapping: keys with values, indented below it",
    "tuple_type": "must be a list, such as [a, b]",
    "list_type": "must be a list, such as [a, b]",
    "too_short": "must have at least one entry",
    "string_too_short": "must not be empty",
}
_WHOLE_NUMBER: Final = ("int_parsing", "int_type", "int_from_float", "int_parsing_size")


class Problem(NamedTuple):
    """One thing that is wrong: the key with dots, what is wrong with its value, the remedy."""

    key: str
    text: str
    hint: str
    unknown: bool

    def sentence(self) -> str:
        """Return the problem as a sentence, without its remedy."""
        key = f"`{self.key}`" if self.key else "the file"
        return f"unknown key {key}" if self.unknown else f"{key} {self.text}"


def read_document(path: Path) -> dict[str, Any]:
    """Return the YAML file `path`. Raise SettingsError when it can't be read, or has no keys."""
    try:
        document = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise SettingsError(
            f"can't read {path}: {error.strerror}",
            operation="read settings",
            hint="pass an existing file with --config",
        ) from error
    except (yaml.YAMLError, UnicodeDecodeError, RecursionError) as error:
        place = getattr(error, "problem_mark", None)
        line = f" in line {place.line + 1}" if place is not None else ""
        raise SettingsError(
            f"{path} is not YAML{line}",
            operation="read settings",
            hint="look for a tab, a wrong indentation, a missing colon or quote, there or in the "
            "line before",
        ) from error
    if not isinstance(document, dict):
        raise SettingsError(f"{path} is not a mapping of sections", operation="read settings")
    return document


def problems(error: ValidationError, path: Path, settings: type[BaseModel]) -> list[Problem]:
    """Return every problem of `error`, unknown keys first."""
    details = error.errors(include_input=False, include_url=False)
    return sorted((_problem(detail, path, settings) for detail in details), key=_unknown_first)


def explained(error: ValidationError, path: Path, settings: type[BaseModel]) -> SettingsError:
    """Return one error that tells all problems of `error`, with the remedies of unknown keys."""
    found = problems(error, path, settings)
    sentences = [problem.sentence() for problem in found[:SHOWN_MAX]]
    if len(found) > SHOWN_MAX:
        sentences.append(f"and {len(found) - SHOWN_MAX} more problems")
    hints = [problem.hint for problem in found[:SHOWN_MAX] if problem.unknown] or [found[0].hint]
    return SettingsError("; ".join(sentences), operation=_OPERATION, hint=" ".join(hints))


def _unknown_first(problem: Problem) -> bool:
    return not problem.unknown


def _problem(detail: ErrorDetails, path: Path, settings: type[BaseModel]) -> Problem:
    """Return a validation error of pydantic as a problem: key, words, hint."""
    keys = [str(part) for part in detail["loc"]]
    key = ".".join(keys)
    if detail["type"] == "extra_forbidden":
        near = difflib.get_close_matches(keys[-1], _keys_beside(keys, settings), n=1)
        hint = f"did you mean `{near[0]}`?" if near else f"remove `{key}` from {path}"
        return Problem(key, "is unknown", hint, unknown=True)
    remedy = "add it to" if detail["type"] == "missing" else "correct it in"
    by_variable = f" or set SLOTBRIDGE_{'__'.join(keys).upper()}" if keys else ""
    hint = f"{remedy} {path}{by_variable}"
    return Problem(key, _words(detail, keys), hint, unknown=False)


def _words(detail: ErrorDetails, keys: list[str]) -> str:
    """Return what is wrong with a value, in words without pydantic's terms."""
    kind, limits = detail["type"], detail.get("ctx", {})
    if kind in _WHOLE_NUMBER:
        unit = " of milliseconds, without a unit" if keys[-1].endswith("_ms") else ""
        return f"must be a whole number{unit}, such as 1000"
    if kind == "string_pattern_mismatch":
        pattern = str(limits["pattern"])
        return _WORDS_FOR_PATTERN.get(pattern, f"must match {pattern}")
    if kind in ("greater_than_equal", "greater_than"):
        least = limits.get("ge", limits.get("gt"))
        return f"must be {'at least' if 'ge' in limits else 'more than'} {least}"
    if kind in ("less_than_equal", "less_than"):
        most = limits.get("le", limits.get("lt"))
        return f"must be {'at most' if 'le' in limits else 'less than'} {most}"
    if kind == "literal_error":
        return f"must be {limits['expected']}"
    if kind == "string_too_long":
        return f"must have at most {limits['max_length']} characters"
    if kind == "value_error":
        return f"is wrong: {detail['msg'].removeprefix('Value error, ')}"
    return _WORDS_FOR_TYPE.get(kind, f"is wrong: {detail['msg']}")


def _keys_beside(keys: list[str], settings: type[BaseModel]) -> list[str]:
    """Return the names of all fields in the section that the last of `keys` is in."""
    model: type[BaseModel] | None = settings
    for key in keys[:-1]:
        field = model.model_fields.get(key) if model is not None else None
        if field is not None:
            model = next(models_in(field.annotation), None)
    return list(model.model_fields) if model is not None else []


def nested_models(model: type[BaseModel]) -> list[type[BaseModel]]:
    """Return the models that the fields of `model` hold, in the order of its fields."""
    fields = model.model_fields.values()
    return [nested for field in fields for nested in models_in(field.annotation)]


def models_in(annotation: Any) -> Iterator[type[BaseModel]]:
    """Yield the models in a type: of `dict[str, Node]` or `Node | None` that is Node."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for part in typing.get_args(annotation):
        yield from models_in(part)
