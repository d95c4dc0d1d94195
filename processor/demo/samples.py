"""The labelled sample events that lie beside a policy."""

from __future__ import annotations

import orjson

from processor.core.policy import Policy
from processor.demo.labelled import Labelled
from processor.errors import ConfigError, RejectRecord

FILE = "sample.jsonl"


def read_samples(policy: Policy, most: int | None = None) -> list[Labelled]:
    """Lines `{"key", "event", "label"}` beside the policy, valid for it; `most` of them, spread
    over the file, which may be sorted. An absent file is no samples. Raises `ConfigError`."""
    file = policy.path.parent / FILE
    if not file.is_file():
        return []
    samples = []
    for number, line in enumerate(file.read_bytes().splitlines(), start=1):
        try:
            samples.append(_sample(policy, line))
        except (orjson.JSONDecodeError, KeyError, TypeError, RejectRecord) as error:
            shown = line.decode(errors="replace")
            remedy = f"needs key, a valid event and a label of the policy: {error}"
            raise ConfigError(str(file), f"line {number}", shown, remedy) from None
    count = len(samples) if most is None else min(most, len(samples))
    return [samples[place * len(samples) // count] for place in range(count)]


def _sample(policy: Policy, line: bytes) -> Labelled:
    content = orjson.loads(line)
    policy.validate(content["event"])
    if content["label"] not in policy.label_names:
        raise KeyError(content["label"])
    return Labelled(content["key"], content["event"], content["label"])
