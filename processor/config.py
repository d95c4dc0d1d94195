"""Typed settings from one YAML file and the environment; an unknown key in either is an error.

Every setting has a variable: `kafka.group` is `PROCESSOR_KAFKA__GROUP`. The environment wins.
The variables are read here and not by a settings library, since those pass over a variable that
names no setting, and a misspelt `PROCESSOR_KAFKA__GRUOP` must not start a second group.
"""

from __future__ import annotations

import json
import os
import platform
import re
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any, Literal, Self, get_origin

from pydantic import BaseModel, ConfigDict, Field, model_validator

from processor.client_properties import ClientProperties
from processor.documents import MASK, key_path, read_yaml, refusal, validate
from processor.errors import ConfigError, ConfigErrors

PREFIX = "PROCESSOR_"
# What Kubernetes sets for each Service of the namespace, where one is named `processor...`.
_SERVICE_LINK = re.compile(
    r"PROCESSOR_([A-Z0-9]+_)*?(SERVICE_HOST|SERVICE_PORT(_[A-Z0-9]+)*"
    r"|PORT|PORT_\d+_(TCP|UDP|SCTP)(_(PROTO|PORT|ADDR))?)"
)

Milliseconds = Annotated[int, Field(ge=1, le=2**31 - 1)]
# Ids must need no quoting anywhere: in Kafka's access rules, in metrics, in a shell.
Id = Annotated[str, Field(pattern=r"^[A-Za-z0-9._-]{1,200}$")]


def _host_ordinal() -> str:
    """The ordinal that a StatefulSet puts at the end of its pods' names."""
    found = re.search(r"-(\d+)$", platform.node().split(".")[0])
    return found[1] if found else "0"


def _cache_dir(environ: Mapping[str, str]) -> Path:
    base = Path(environ.get("XDG_CACHE_HOME", ""))
    return (base if base.is_absolute() else Path("~/.cache").expanduser()) / "processor"


class _Section(BaseModel):
    # The input is hidden in errors, for it may hold a secret; `load_settings` shows it masked.
    model_config = ConfigDict(
        extra="forbid", frozen=True, strict=True, allow_inf_nan=False, hide_input_in_errors=True
    )


class ModelSettings(_Section):
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


class BatchSettings(_Section):
    """The most that one forward pass takes."""

    max_rows: Annotated[int, Field(ge=1, description="the longest event must fit")] = 2048
    max_events: Annotated[int, Field(ge=1)] = 32


class KafkaSettings(_Section):
    """The cluster, and this replica's place in its consumer group."""

    bootstrap_servers: Annotated[str, Field(pattern=r"^\S+$")] = "localhost:9092"
    group: Id = "processor"
    replica: Annotated[
        Id, Field(description="stable name of this replica; default: the host name's ordinal or 0")
    ] = Field(default_factory=_host_ordinal)
    transactional_id_prefix: Id = "processor"
    static_membership: Annotated[
        bool, Field(description="a restart within the session keeps the partitions")
    ] = True
    session_timeout_ms: Milliseconds = 12_000
    max_poll_interval_ms: Milliseconds = 300_000
    transaction_timeout_ms: Annotated[
        Milliseconds, Field(description="brokers refuse more than 15 minutes unless told otherwise")
    ] = 30_000
    retry_backoff_ms: Milliseconds = 5
    publish_timeout_ms: Annotated[
        Milliseconds, Field(description="budget of all calls of one transaction")
    ] = 10_000
    auto_offset_reset: Annotated[
        Literal["error", "earliest", "latest"],
        Field(description="where to start a partition without a valid committed offset"),
    ] = "earliest"
    client: Annotated[
        ClientProperties, Field(description="further librdkafka properties: security and the like")
    ] = {}

    @property
    def transactional_id(self) -> str:
        """Stable per replica: a restarted one aborts its dead predecessor's transaction at once."""
        return f"{self.transactional_id_prefix}-{self.group}-{self.replica}"

    @property
    def group_instance_id(self) -> str | None:
        return self.transactional_id if self.static_membership else None

    @model_validator(mode="after")
    def _timeouts_fit(self) -> Self:
        session, poll = self.session_timeout_ms, self.max_poll_interval_ms
        transaction, publish = self.transaction_timeout_ms, self.publish_timeout_ms
        if session >= poll:
            raise refusal(
                "session_timeout_ms", session, f"must be below max_poll_interval_ms = {poll}"
            )
        if transaction < 2 * publish:
            remedy = f"raise it to {2 * publish}, twice publish_timeout_ms, or lower that"
            raise refusal("transaction_timeout_ms", transaction, remedy)
        if transaction > 900_000:
            remedy = "lower it to 900000: brokers refuse more (transaction.max.timeout.ms)"
            raise refusal("transaction_timeout_ms", transaction, remedy)
        return self


class RuntimeSettings(_Section):
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


class Settings(_Section):
    """All settings of one process."""

    policies: Annotated[
        tuple[Path, ...], Field(description="policy folders, relative to the settings file")
    ] = ()
    model: ModelSettings = Field(default_factory=ModelSettings)
    batch: BatchSettings = BatchSettings()
    kafka: KafkaSettings = Field(default_factory=KafkaSettings)
    runtime: RuntimeSettings = RuntimeSettings()


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
    kind = tuple if keys == ("policies",) else section.model_fields[keys[1]].annotation  # type: ignore[union-attr]
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
