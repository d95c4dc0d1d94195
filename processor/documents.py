"""Files written by people, read strictly: every mistake is named by file, key, value and remedy."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import yaml
from pydantic import BaseModel, ValidationError
from pydantic_core import PydanticCustomError

from processor.errors import ConfigError, ConfigErrors

Model = TypeVar("Model", bound=BaseModel)
Keys = tuple[str | int, ...]
Locate = Callable[[Keys], tuple[str, str]]

MASK = "**********"
_SECRET = re.compile(
    r"pass|secret|token|credential|pem$|ssl.key|jaas|oauthbearer|client$", re.IGNORECASE
)


class Secret(str):
    """A text that works like any other but is shown by no `repr`, so by no log or traceback."""

    __slots__ = ()

    def __repr__(self) -> str:
        return f"'{MASK}'"


def refusal(field: str, value: Any, remedy: str) -> PydanticCustomError:
    """An error of a model's validator that names the field at fault and what to do."""
    context = {"remedy": remedy, "field": field, "value": value}
    return PydanticCustomError("relation", "{remedy}", context)


def read_text(file: Path, key: str, value: str, named_in: Path | None = None) -> str:
    """A UTF-8 file; the byte order mark that some editors write is no part of the text.

    Errors point to the document that names the file, where there is one.
    """
    where = str(named_in or file)
    try:
        return file.read_text(encoding="utf-8-sig")
    except FileNotFoundError:
        raise ConfigError(where, key, value, "no such file: correct the path") from None
    except UnicodeDecodeError:
        raise ConfigError(where, key, value, "not UTF-8: save the file as UTF-8") from None
    except OSError as error:
        raise ConfigError(where, key, value, f"cannot be read: {error.strerror}") from None


def read_yaml(file: Path, key: str, value: str) -> Any:
    text = read_text(file, key, value)
    try:
        return yaml.load(text, Loader=_UniqueKeys)
    except (yaml.YAMLError, RecursionError, ValueError) as error:
        line = " ".join(str(error).split())
        raise ConfigError(str(file), key, value, f"not YAML: {line}") from None


def validate(model: type[Model], content: Any, locate: Locate) -> Model:
    """The content of a document as a model, nothing coerced: YAML's lists and numbers are JSON's.

    `locate` says where the value at some keys was written: file or environment, and its name.
    """
    try:
        text = json.dumps(content, default=str)
    except (TypeError, ValueError, RecursionError) as error:
        where, key = locate(())
        raise ConfigError(where, key, type(content).__name__, f"not JSON-like: {error}") from None
    try:
        return model.model_validate_json(text)
    except ValidationError as error:
        raise ConfigErrors([_config_error(item, locate) for item in error.errors()]) from None


def key_path(keys: Keys) -> str:
    """`labels[2].name` for the keys of a nested value."""
    parts = (f"[{key}]" if isinstance(key, int) else f".{key}" for key in keys)
    return "".join(parts).removeprefix(".")


def is_secret(key: str) -> bool:
    """Whether a key's name says that its value must not be shown."""
    return _SECRET.search(key) is not None


def masked(value: Any) -> Any:
    """A copy to show, without the secrets that it holds."""
    if isinstance(value, Mapping):
        return {key: MASK if is_secret(str(key)) else masked(item) for key, item in value.items()}
    if isinstance(value, list):
        return [masked(item) for item in value]
    return value


def _config_error(error: Any, locate: Locate) -> ConfigError:
    context = error.get("ctx", {})
    where, key = locate((*error["loc"], *((context["field"],) if "field" in context else ())))
    value = context.get("value", error["input"])
    remedy = str(error["msg"]).removeprefix("Value error, ")
    if error["type"] == "extra_forbidden":
        remedy = "unknown key: remove it or correct its name"
    elif error["type"] == "missing":
        value, remedy = None, "the key is required: add it"
    elif error["type"] == "string_type" and isinstance(value, bool | int | float):
        remedy = "YAML does not read this as a text: put it in quotes"
    return ConfigError(where, key, MASK if is_secret(key) else masked(value), remedy)


class _UniqueKeys(yaml.SafeLoader):
    """YAML whose mappings refuse a second equal key, as the JSON decoder of events does."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys = [self.construct_object(key, deep=True) for key, _ in node.value]
        for key in keys:
            if keys.count(key) > 1:
                raise yaml.MarkedYAMLError(
                    problem=f"key {key!r} stands twice", problem_mark=node.start_mark
                )
        return super().construct_mapping(node, deep)
