"""JSON Schemas of what is published and of what users write, generated from the types."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel

from processor.config import Settings
from processor.core.decision import Decision, Rejection
from processor.core.policy import PolicySpec

DIALECT = "https://json-schema.org/draft/2020-12/schema"
# What we write is described as it is written, what users write as it is read.
_PUBLISHED: dict[str, tuple[type[BaseModel], Literal["serialization", "validation"]]] = {
    "decision": (Decision, "serialization"),
    "rejection": (Rejection, "serialization"),
    "policy": (PolicySpec, "validation"),
    "settings": (Settings, "validation"),
}


def published_schemas() -> dict[str, dict[str, Any]]:
    """The schema of each published document, by its name; the file is `<name>.json`."""
    return {
        name: {"$schema": DIALECT, **model.model_json_schema(mode=mode)}
        for name, (model, mode) in _PUBLISHED.items()
    }


def schema_texts() -> dict[str, str]:
    """File name to content: equal types give equal bytes."""
    return {
        f"{name}.json": json.dumps(schema, indent=2, sort_keys=True, ensure_ascii=False) + "\n"
        for name, schema in published_schemas().items()
    }


def write_schemas(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in schema_texts().items():
        (folder / name).write_text(text, encoding="utf-8")


def outdated_schemas(folder: Path) -> list[str]:
    """Names of the files that are missing or differ from the types."""
    return [
        name
        for name, text in schema_texts().items()
        if not (folder / name).is_file() or (folder / name).read_text(encoding="utf-8") != text
    ]
