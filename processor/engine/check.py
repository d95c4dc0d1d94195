"""What `policy check` finds out about a policy under a model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import mean
from typing import Any

from processor.core.batch import Suffix
from processor.core.policy import Policy, render_suffix
from processor.engine.scorer import PrefixScorer
from processor.engine.tokenizer import SuffixTokenizer
from processor.errors import ConfigError, RejectRecord

LABEL_MASS_FLOOR = 0.5


@dataclass(frozen=True, slots=True)
class PolicyReport:
    """`label_mass`: mean probability, over the sample events, that the model's next token begins
    a label; None without samples."""

    policy: str
    version: str
    fingerprint: str
    labels: int
    prefix_tokens: int
    label_rows: int
    samples: int
    suffix_tokens_mean: float | None
    label_mass: float | None
    warnings: tuple[str, ...]


def check_policy(
    policy: Policy,
    tokenizer: SuffixTokenizer,
    scorer: PrefixScorer,
    samples: Sequence[Mapping[str, Any]],
) -> PolicyReport:
    """Run sample events (decoded, valid) through the model and judge how well it understands.

    Raises `ConfigError` for a sample that the model cannot read."""
    try:
        suffixes = [
            Suffix(policy.key, tokenizer.encode(policy.key, render_suffix(policy, event)))
            for event in samples
        ]
    except RejectRecord as error:
        where, key = str(policy.path), "sample events"
        raise ConfigError(where, key, error.reason, error.detail) from None
    mass = mean(map(scorer.label_mass, suffixes)) if suffixes else None
    compiled = tokenizer.policies[policy.key]
    return PolicyReport(
        policy=policy.name,
        version=policy.spec.version,
        fingerprint=policy.fingerprint,
        labels=len(policy.label_names),
        prefix_tokens=compiled.prefix_tokens,
        label_rows=compiled.trie.rows,
        samples=len(suffixes),
        suffix_tokens_mean=mean(len(s.token_ids) for s in suffixes) if suffixes else None,
        label_mass=mass,
        warnings=tuple(_warnings(mass)),
    )


def _warnings(mass: float | None) -> list[str]:
    if mass is None:
        return ["no sample.jsonl beside the policy: the label mass was not measured"]
    if mass < LABEL_MASS_FLOOR:
        return [
            f"mean label mass {mass:.2f} is below {LABEL_MASS_FLOOR}: the model mostly wants to "
            "say something else; add worked examples to the prefix or reword the cue"
        ]
    return []
