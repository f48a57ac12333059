"""The JSON Schema of the configuration file, for editors: docs/reference/configuration.schema.json.

`make generate` writes the file and `slotbridge schema` prints it. Name it in the first line of a
configuration file, and an editor with a YAML language server completes and checks the keys:

    # yaml-language-server: $schema=configuration.schema.json
"""

import inspect
import json
from typing import Any

from pydantic import BaseModel

from schemas.problems import models_in, nested_models
from schemas.reference import TEMPORARY, field_meanings
from schemas.settings import Settings


def settings_schema() -> dict[str, Any]:
    """Return the schema.

    A section may be empty, and its keys are not required, because the environment may set them.
    """
    schema = Settings.model_json_schema()
    definitions = schema.pop("$defs")
    for model in all_models():
        meanings = field_meanings(model)
        properties = definitions[model.__name__]["properties"]
        for name, definition in properties.items():
            nested = next(models_in(model.model_fields[name].annotation), model)
            if "$ref" in definition:
                definition = properties[name] = _section(definition)
            definition["description"] = meanings.get(name) or _first_line(nested)
    for section in nested_models(Settings):
        definitions[section.__name__].pop("required", None)
    _tidy(definitions)
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "Configuration of Slotbridge",
        "description": "Made from the settings' classes by `make generate`; do not edit it.",
        "type": "object",
        "additionalProperties": False,
        "properties": {name: _section(section) for name, section in schema["properties"].items()},
        "$defs": definitions,
    }


def schema_file_text() -> str:
    """Return the schema as the text of a file."""
    return json.dumps(settings_schema(), indent=1) + "\n"


def all_models() -> list[type[BaseModel]]:
    """Return every model of the settings: the sections, and what is nested in them."""
    found: list[type[BaseModel]] = []
    waiting = list(nested_models(Settings))
    while waiting:
        model = waiting.pop()
        if model not in found:
            found.append(model)
            waiting += nested_models(model)
    return found


def _section(definition: dict[str, Any]) -> dict[str, Any]:
    """Return the definition of a section: its keys, or nothing, as a name without keys has it."""
    parts = [definition, *definition.get("anyOf", ())]
    reference = next(part["$ref"] for part in parts if "$ref" in part)
    return {"anyOf": [{"$ref": reference}, {"type": "null"}]}


def _first_line(model: type[BaseModel]) -> str:
    return (inspect.getdoc(model) or "").splitlines()[0]


def _tidy(node: Any) -> None:
    """Remove titles that only repeat a key, and defaults that differ from machine to machine."""
    if isinstance(node, dict):
        if isinstance(node.get("title"), str):
            del node["title"]
        if node.get("default") == str(TEMPORARY):
            del node["default"]
        for value in node.values():
            _tidy(value)
    elif isinstance(node, list):
        for value in node:
            _tidy(value)
