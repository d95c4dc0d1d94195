"""Typed settings from one YAML file and the environment; an unknown key in either is an error.

Every setting has a variable: `kafka.group` is `PROCESSOR_KAFKA__GROUP`. The environment wins.
The variables are read here and not by a settings library, since those pass over a variable that
names no setting, and a misspelt `PROCESSOR_KAFKA__GRUOP` must not start a second group.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any, Literal, Self, get_origin

from pydantic import Field, model_validator

from processor.documents import MASK, key_path, read_yaml, refusal, validate
from processor.errors import ConfigError, ConfigErrors
from processor.kafka_settings import STEP_BUDGETS, KafkaSettings, Section

__all__ = ["KafkaSettings", "ModelSettings", "Settings", "load_settings"]

PREFIX = "PROCESSOR_"
# What Kubernetes sets for each Service of the namespace, where one is named `processor...`.
_SERVICE_LINK = re.compile(
    r"PROCESSOR_([A-Z0-9]+_)*?(SERVICE_HOST|SERVICE_PORT(_[A-Z0-9]+)*"
    r"|PORT|PORT_\d+_(TCP|UDP|SCTP)(_(PROTO|PORT|ADDR))?)"
)


def _cache_dir(environ: Mapping[str, str]) -> Path:
    base = Path(environ.get("XDG_CACHE_HOME", ""))
    return (base if base.is_absolute() else Path("~/.cache").expanduser()) / "processor"


class ModelSettings(Section):
    """Which model, and how it is run."""

    source: Annotated[
        str,
        Field(
            min_length=1,
            description="`smollm2` (the packaged default), a hub id, a folder or a .gguf file; "
            "a path that starts with `.` or ends in .gguf is relative to the settings file",
        ),
    ] = "smollm2"
    revision: Annotated[str | None, Field(description="branch, tag or commit of a hub id")] = None
    dtype: Annotated[
        Literal["auto", "float32", "bfloat16", "float16"],
        Field(description="auto: the fastest on this chip, measured at start"),
    ] = "auto"
    device: Literal["auto", "cpu", "cuda"] = "auto"
    cache_dir: Annotated[Path, Field(description="default: $XDG_CACHE_HOME/processor")] = Field(
        default_factory=lambda: _cache_dir(os.environ)
    )
    threads: Annotated[int, Field(ge=0, description="0: all cores")] = 0
    kernels: Annotated[
        Literal["auto", "torch"],
        Field(description="auto: compile our CPU kernels where they serve; torch: its own only"),
    ] = "auto"
    snapshots: Annotated[
        bool, Field(description="keep frozen prefixes in `cache_dir`, for the next start")
    ] = True

    @model_validator(mode="after")
    def _revision_of_a_hub_id(self) -> Self:
        if self.revision and (self.source == "smollm2" or self.source.endswith(".gguf")):
            raise refusal("revision", self.revision, "only a hub id has one: remove it")
        return self


class BatchSettings(Section):
    """The most that one forward pass takes."""

    max_rows: Annotated[int, Field(ge=1, description="the longest event must fit")] = 2048
    max_events: Annotated[int, Field(ge=1)] = 32


class RuntimeSettings(Section):
    """When to stop, and when to give up."""

    hang_s: Annotated[
        float,
        Field(gt=0, description="the process ends when the thread that polls is away for so long"),
    ] = 60.0
    score_timeout_s: Annotated[
        float,
        Field(
            gt=0, description="... or the model with one micro-batch; large models on CPUs are slow"
        ),
    ] = 300.0
    stall_s: Annotated[
        float,
        Field(gt=0, description="... or when records of a partition wait and none of them comes"),
    ] = 120.0
    max_rejections_in_row: Annotated[
        int, Field(ge=0, description="... or when nothing but rejections is made; 0: never")
    ] = 1000
    drain_s: Annotated[
        float, Field(gt=0, description="seconds to finish what was begun after a stop signal")
    ] = 20.0
    reload_s: Annotated[
        float,
        Field(
            ge=0,
            description="seconds between two looks at the policy folders for new versions; 0: only "
            "on SIGHUP",
        ),
    ] = 0.0


class Settings(Section):
    """All settings of one process."""

    policies: Annotated[
        tuple[Path, ...], Field(description="policy folders, relative to the settings file")
    ] = ()
    model: ModelSettings = Field(default_factory=ModelSettings)
    batch: BatchSettings = BatchSettings()
    kafka: KafkaSettings = Field(default_factory=KafkaSettings)
    runtime: RuntimeSettings = RuntimeSettings()

    @model_validator(mode="after")
    def _hang_exceeds_a_step(self) -> Self:
        least = STEP_BUDGETS * self.kafka.publish_timeout_ms / 1000
        if self.runtime.hang_s <= least:
            remedy = f"raise it above {least:.0f}, {STEP_BUDGETS} times kafka.publish_timeout_ms"
            raise refusal("runtime.hang_s", self.runtime.hang_s, remedy)
        return self


def load_settings(path: Path | None, environ: Mapping[str, str]) -> Settings:
    """Settings from a file and the variables `PROCESSOR_*`; either may be absent.

    Raises `ConfigError` or `ConfigErrors`: where, key, value and remedy of everything wrong.
    """
    content = read_yaml(path, "settings", str(path)) if path else None
    content = {} if content is None else content
    if not isinstance(content, dict):
        raise ConfigError(str(path), "settings", content, "must be a mapping of sections")
    known = Settings.model_fields  # a section may be empty; an unknown one may not
    data = {k: v for k, v in content.items() if v is not None or k not in known}
    variables = _read_environment(environ)
    for keys, (_, value) in variables.items():
        _put(data, keys, value)
    _put(data, ("model", "cache_dir"), str(_cache_dir(environ)), keep=True)

    def locate(keys: tuple[str | int, ...]) -> tuple[str, str]:
        for length in range(len(keys), 0, -1):
            if found := variables.get(tuple(map(str, keys[:length]))):
                return "environment", found[0]
        return str(path or "settings"), key_path(keys) or "settings"

    settings = validate(Settings, data, locate)
    return _resolved(settings, path.parent if path else Path())


def _resolved(settings: Settings, base: Path) -> Settings:
    """The same settings with paths that no longer depend on where the settings file is."""
    model, source = settings.model, settings.model.source
    if source.startswith((".", "~")) or source.endswith(".gguf"):
        source = str(base / Path(source).expanduser())
    cache_dir = base / model.cache_dir.expanduser()
    return settings.model_copy(
        update={
            "policies": tuple(base / policy.expanduser() for policy in settings.policies),
            "model": model.model_copy(update={"source": source, "cache_dir": cache_dir}),
        }
    )


def _read_environment(environ: Mapping[str, str]) -> dict[tuple[str, ...], tuple[str, Any]]:
    """For each variable that names a setting: its keys, its own name and its value."""
    found: dict[tuple[str, ...], tuple[str, Any]] = {}
    unknown: list[ConfigError] = []
    for name, text in sorted(environ.items()):
        if not name.startswith(PREFIX) or _SERVICE_LINK.fullmatch(name):
            continue
        keys = _setting_keys(name)
        if keys is None:
            # The value is not shown: what a misspelt name holds may be a password.
            remedy = "names no setting: remove it or correct its name"
            unknown.append(ConfigError("environment", name, MASK, remedy))
        else:
            found[keys] = (name, _parse_variable(keys, text))
    if unknown:
        raise ConfigErrors(unknown)
    return found


def _setting_keys(name: str) -> tuple[str, ...] | None:
    if name != name.upper():
        return None
    section, *rest = name.removeprefix(PREFIX).lower().split("__")
    if section == "policies" and not rest:
        return (section,)
    field = Settings.model_fields.get(section)
    fields = getattr(field.annotation, "model_fields", {}) if field else {}
    match rest:
        case [key] if key in fields:
            return section, key
        case ["client", key] if section == "kafka" and key:
            return section, "client", key.replace("_", ".")
    return None


def _parse_variable(keys: tuple[str, ...], text: str) -> Any:
    """The value of a variable: JSON where the setting is no text; policies also with commas."""
    if keys == ("policies",) and not text.lstrip().startswith("["):
        return [part.strip() for part in text.split(",") if part.strip()]
    section = Settings.model_fields[keys[0]].annotation
    kind: Any = tuple if keys == ("policies",) else section.model_fields[keys[1]].annotation  # type: ignore[union-attr]
    kind = bool if kind == bool | None else kind
    if len(keys) < 3 and (kind in (int, float, bool, tuple) or get_origin(kind) is dict):
        with suppress(ValueError, RecursionError):  # stays text; the model then complains
            return json.loads(text.lower() if kind is bool else text)
    return text


def _put(data: dict[str, Any], keys: tuple[str, ...], value: Any, keep: bool = False) -> None:
    """Set a nested value. Where a section is no mapping, the model reports that instead."""
    node: Any = data
    for key in keys[:-1]:
        node = node.setdefault(key, {})
        if not isinstance(node, dict):
            return
    node[keys[-1]] = node.get(keys[-1], value) if keep else value
