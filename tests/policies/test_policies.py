"""The example policies: loadable, balanced, within their budget, and measured on unseen events."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from processor.core.policy import Policy, load_policy, render_suffix
from processor.demo.orders import order_label, order_signals

POLICIES = Path(__file__).parents[2] / "policies"
TOKENS = {
    "orders": range(1900, 2101),
    "messages": range(700, 1101),
    "telemetry": range(500, 1201),
    "tools": range(3300, 3701),
    "routes": range(1200, 1601),
}


class Row(NamedTuple):
    """A labelled event of a sample, or a worked example of a prefix."""

    text: str
    label: str
    event: dict[str, Any]


@pytest.fixture(params=TOKENS)
def policy(request: pytest.FixtureRequest) -> Policy:
    return load(request.param)


@cache
def load(name: str) -> Policy:
    return load_policy(POLICIES / name)


def examples(policy: Policy) -> Iterator[Row]:
    """Worked examples of the prefix, read back from its text."""
    prompt = policy.spec.prompt
    names = {label.text: label.name for label in policy.spec.labels}
    for block in policy.prefix.split("\n\n"):
        if block.startswith(prompt.lead):
            event, answer = block.removeprefix(prompt.lead).split("\n")
            label = names[answer.removeprefix(prompt.cue + " ")]
            yield Row(event, label, json.loads(event))


def sample(policy: Policy) -> Iterator[Row]:
    for line in (policy.path.parent / "sample.jsonl").read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        assert row.keys() == {"key", "event", "label"}
        yield Row(render_suffix(policy, row["event"]), row["label"], row["event"])


def test_folder_and_topics_bear_the_name_of_the_policy(policy: Policy) -> None:
    topics = policy.spec.topics
    assert policy.path.parent.name == policy.name == topics.input
    assert topics.output == f"{policy.name}.decisions"
    assert topics.dead_letter == f"{policy.name}.dead-letter"


def test_examples_are_balanced_and_many(policy: Policy) -> None:
    count = Counter(row.label for row in examples(policy))
    assert set(count) == set(policy.label_names)
    assert len(set(count.values())) == 1
    assert count.total() >= 16


def test_examples_are_valid_and_rendered_as_events_are(policy: Policy) -> None:
    for row in examples(policy):
        policy.validate(row.event)
        assert render_suffix(policy, row.event) == row.text


def test_prefix_ends_with_an_example(policy: Policy) -> None:
    *_, last = examples(policy)
    assert policy.prefix.endswith(last.text + f"\n{policy.spec.prompt.cue} {_text(policy, last)}")


def _text(policy: Policy, row: Row) -> str:
    return next(label.text for label in policy.spec.labels if label.name == row.label)


def test_sample_is_valid_and_labelled(policy: Policy) -> None:
    rows = list(sample(policy))
    assert 100 <= len(rows) <= 300
    assert {row.label for row in rows} == set(policy.label_names)
    for row in rows:
        policy.validate(row.event)


def test_sample_holds_no_example(policy: Policy) -> None:
    shown = {row.text for row in examples(policy)}
    assert not shown & {row.text for row in sample(policy)}


def test_sample_keys_are_distinct(policy: Policy) -> None:
    lines = (policy.path.parent / "sample.jsonl").read_text(encoding="utf-8").splitlines()
    keys = [json.loads(line)["key"] for line in lines]
    assert len(set(keys)) == len(keys)


def test_every_policy_has_a_band_of_review(policy: Policy) -> None:
    assert policy.spec.thresholds.review_below_margin > 0
    assert policy.spec.thresholds.review_action not in {x.action for x in policy.spec.labels[:1]}


def test_sensors_of_the_sample_are_not_those_of_the_training() -> None:
    assert {row.event["sensor"] for row in sample(load("telemetry"))} == {"mote-3", "mote-4"}


def test_orders_are_labelled_by_the_rules() -> None:
    for row in sample(load("orders")):
        assert row.event["signals"] == order_signals(row.event)
        assert row.label == order_label(row.event)


def test_the_prefix_of_orders_defines_every_signal() -> None:
    rules, _, _ = load("orders").prefix.partition("# Decided orders")
    signals = load("orders").event_schema["properties"]["signals"]["items"]["enum"]
    assert [signal for signal in signals if signal not in rules] == []


def test_tools_have_names_of_several_words() -> None:
    assert len(load("tools").label_names) == 40
    assert all("." in name for name in load("tools").label_names)


def test_routes_are_nineteen() -> None:
    assert len(load("routes").label_names) == 19


@pytest.mark.slow
def test_prefix_tokens_are_within_budget(policy: Policy, packaged_tokenizer: Any) -> None:
    count = len(packaged_tokenizer(policy.prefix, add_special_tokens=False)["input_ids"])
    assert count in TOKENS[policy.name]


@pytest.mark.slow
def test_orders_are_about_150_tokens(packaged_tokenizer: Any) -> None:
    rows = [row.text for row in sample(load("orders"))]
    count = sum(len(packaged_tokenizer(text)["input_ids"]) for text in rows)
    assert 130 <= count / len(rows) <= 170
