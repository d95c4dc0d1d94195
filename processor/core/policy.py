"""A policy: everything that says how one topic is decided.

A policy is a folder with `policy.yaml` (the fields of `PolicySpec`) and the files it names.
`load_policy` reads all of it once; afterwards nothing of the policy is read from disk again.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, Literal, Self

import jsonschema_rs
from pydantic import BaseModel, ConfigDict, Field, model_validator
from pydantic_core import CoreSchema

from processor import documents
from processor.core.render import Renderer, compile_renderer
from processor.errors import ConfigError, RejectRecord

Topic = Annotated[str, Field(pattern=r"^[A-Za-z0-9._-]{1,249}$")]
Name = Annotated[str, Field(pattern=r"^[a-z][a-z0-9_-]{0,62}$")]


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)


class Prompt(_Strict):
    """How prefix, event and label are put together.

    `plain`: prefix.md, an empty line, `lead`, the event, a line break, `cue`, a space, the label.
    `chat`: the model's own chat template; prefix.md is the system message, lead and event are the
    user's, and the label is what the assistant says first.
    """

    style: Literal["plain", "chat"] = "plain"
    lead: str = "Event: "
    cue: str = "Decision:"


class EventSpec(_Strict):
    """Which events are valid, and which of their top-level fields the model sees."""

    json_schema: Annotated[str, Field(alias="schema", description="path of a JSON Schema file")]
    fields: Annotated[list[str], Field(min_length=1)]
    max_bytes: Annotated[int, Field(ge=2, le=64 * 2**20)] = 64 * 2**10
    tombstones: Annotated[
        Literal["reject", "skip", "pass"],
        Field(
            description="what becomes of a record without a value: a rejection, nothing but a "
            "count, or a record without a value and with the same key on the output topic"
        ),
    ] = "reject"


class Label(_Strict):
    """One answer of the model, and the action that follows from it. A text alone is its name."""

    name: Annotated[str, Field(min_length=1, max_length=200)]
    text: Annotated[str, Field(description="what the model says; default: the name")] = ""
    action: Annotated[str, Field(description="what is to be done; default: the name")] = ""
    min_score: Annotated[
        float, Field(ge=0, le=1, description="below it the action is `review_action`")
    ] = 0.0

    @model_validator(mode="before")
    @classmethod
    def _defaults(cls, data: Any) -> Any:
        if isinstance(data, str):
            data = {"name": data}
        elif isinstance(data, bool | int | float | None):
            raise ValueError("YAML does not read this as a text: put it in quotes")
        if isinstance(data, dict) and isinstance(data.get("name"), str):
            data = {"text": data["name"], "action": data["name"]} | data
        return data

    @model_validator(mode="after")
    def _label_has_text(self) -> Self:
        if not self.text.strip() or not self.action.strip():
            raise ValueError("a label needs a text that the model can say, and an action")
        return self

    @classmethod
    def __get_pydantic_json_schema__(cls, core: CoreSchema, handler: Any) -> dict[str, Any]:
        schema = handler.resolve_ref_schema(handler(core))
        return {"anyOf": [{"type": "string", "minLength": 1}, schema]}


class Thresholds(_Strict):
    """When the best label is too close to the second to act on it."""

    review_below_margin: Annotated[
        float, Field(ge=0, le=1, description="smallest margin (best minus second score) to act on")
    ] = 0.05
    review_action: Annotated[str, Field(min_length=1)] = "review"


class Calibration(_Strict):
    """Scores are softmax((log-probability + bias) / temperature). Labels without a bias have 0."""

    temperature: Annotated[float, Field(gt=0)] = 1.0
    bias: dict[str, float] = {}


class Topics(_Strict):
    input: Topic
    output: Topic
    dead_letter: Topic

    @model_validator(mode="after")
    def _all_different(self) -> Self:
        if len({self.input, self.output, self.dead_letter}) < 3:
            raise ValueError("input, output and dead_letter must be three different topics")
        return self


class PolicySpec(_Strict):
    """The content of a `policy.yaml`."""

    name: Name
    version: Annotated[str, Field(min_length=1, max_length=100)]
    description: str = ""
    prefix: Annotated[str, Field(description="path of the prefix text")] = "prefix.md"
    prompt: Prompt = Prompt()
    event: EventSpec
    labels: Annotated[list[Label], Field(min_length=2)]
    thresholds: Thresholds = Thresholds()
    calibration: Calibration = Calibration()
    topics: Topics
    tenant: Annotated[
        str | None, Field(min_length=1, max_length=200, description="who the policy belongs to")
    ] = None
    share_prefix: Annotated[
        bool,
        Field(
            description="other tenants' policies that say so too may share the beginning of the "
            "prefix in memory; how fast a policy is ready then tells whether another begins alike"
        ),
    ] = False

    @model_validator(mode="after")
    def _labels_fit(self) -> Self:
        names = [label.name for label in self.labels]
        if twice := _first_twice(names):
            raise documents.refusal("labels", twice, "two labels have the same name: rename one")
        if twice := _first_twice([label.text.strip() for label in self.labels]):
            raise documents.refusal("labels", twice, "two labels have the same text: reword one")
        if unknown := sorted(set(self.calibration.bias) - set(names)):
            remedy = f"names no label: one of {', '.join(names)}"
            raise documents.refusal("calibration.bias", unknown[0], remedy)
        return self


@dataclass(frozen=True)
class Policy:
    """A loaded policy. Equal fingerprints mean equal decisions under an equal model."""

    spec: PolicySpec
    prefix: str
    event_schema: Mapping[str, Any] = field(repr=False)
    path: Path

    @property
    def name(self) -> str:
        return self.spec.name

    @cached_property
    def key(self) -> str:
        """Tells versions of one policy apart, where two are served at the same time."""
        return f"{self.name}@{self.fingerprint[:12]}"

    @cached_property
    def label_names(self) -> tuple[str, ...]:
        return tuple(label.name for label in self.spec.labels)

    @cached_property
    def fingerprint(self) -> str:
        """SHA-256 (hex) over the length-framed parts, so that no two splits of one text agree.
        Who owns the policy and where its tensors lie decides nothing, and is left out."""
        spec = self.spec.model_dump(mode="json", exclude={"tenant", "share_prefix"})
        digest = hashlib.sha256()
        for part in (
            json.dumps(spec, sort_keys=True).encode(),
            self.prefix.encode(),
            # Not sorted: fields are rendered in the schema's order, so it decides scores.
            json.dumps(self.event_schema).encode(),
        ):
            digest.update(len(part).to_bytes(8, "big") + part)
        return digest.hexdigest()

    @cached_property
    def render(self) -> Renderer:
        return compile_renderer(self.event_schema, self.spec.event.fields)

    @cached_property
    def validate(self) -> Callable[[dict[str, Any]], None]:
        """Check one decoded event. Raises `RejectRecord('schema', ...)` with the path of the
        first error; values are masked, for they may be personal."""
        validator = jsonschema_rs.validator_for(
            dict(self.event_schema), mask="(value)", validate_formats=True, offline=True
        )

        def validate(data: dict[str, Any]) -> None:
            try:
                validator.validate(data)
            except jsonschema_rs.ValidationError as error:
                where = "/".join(map(str, error.instance_path)) or "(top level)"
                raise RejectRecord("schema", f"{where}: {error.message}"[:500]) from None

        return validate


def render_suffix(policy: Policy, data: Mapping[str, Any]) -> str:
    """The event as the model sees it: chosen fields in schema order, compact canonical JSON."""
    return policy.render(data)


def load_policy(path: str | Path) -> Policy:
    """Load a policy from its folder or its `policy.yaml`.

    Raises `ConfigError` or `ConfigErrors`: file, key, value and remedy of everything wrong.
    """
    file = Path(path)
    file = file / "policy.yaml" if file.is_dir() else file
    content = documents.read_yaml(file, "policy", str(path))
    spec = documents.validate(
        PolicySpec, content, lambda keys: (str(file), documents.key_path(keys) or "policy")
    )
    prefix = documents.read_text(file.parent / spec.prefix, "prefix", spec.prefix, file).strip()
    if not prefix:
        raise ConfigError(str(file), "prefix", spec.prefix, "the file is empty: write the policy")
    schema = _load_schema(file, spec)
    for name in spec.event.fields:
        if name not in schema["properties"]:
            remedy = f"not among the properties of {spec.event.json_schema}"
            raise ConfigError(str(file), "event.fields", name, remedy)
    return Policy(spec, prefix, schema, file)


def _first_twice(names: list[str]) -> str | None:
    return next((name for i, name in enumerate(names) if name in names[:i]), None)


def _load_schema(file: Path, spec: PolicySpec) -> dict[str, Any]:
    name = spec.event.json_schema
    text = documents.read_text(file.parent / name, "event.schema", name, file)
    try:
        schema = json.loads(text)
        jsonschema_rs.validator_for(schema, offline=True)
    except (ValueError, RecursionError) as error:
        line = (str(error) or "nested too deep").splitlines()[0]
        raise ConfigError(str(file), "event.schema", name, f"no JSON Schema: {line}") from None
    if not isinstance(schema, dict) or not schema.get("properties"):
        raise ConfigError(str(file), "event.schema", name, "must describe an object's properties")
    return schema
