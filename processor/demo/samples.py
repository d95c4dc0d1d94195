"""The labelled sample events that lie beside a policy."""

from __future__ import annotations

from pathlib import Path

import orjson

from processor.demo.generate import Labelled
from processor.errors import ConfigError

FILE = "sample.jsonl"


def read_samples(folder: Path, most: int | None = None) -> list[Labelled]:
    """Lines `{"key", "event", "label"}`; an absent file is no samples. Raises `ConfigError`."""
    file = folder / FILE
    if not file.is_file():
        return []
    samples = []
    for number, line in enumerate(file.read_bytes().splitlines()[:most], start=1):
        try:
            content = orjson.loads(line)
            samples.append(Labelled(content["key"], content["event"], content["label"]))
        except (orjson.JSONDecodeError, KeyError, TypeError) as error:
            remedy = f"needs key, event and label: {error}"
            raise ConfigError(str(file), f"line {number}", line.decode(), remedy) from None
    return samples
