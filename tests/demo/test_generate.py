"""The generators: seeded, valid, and labelled by the rules that the prefixes state."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path

import pytest

from processor.core.policy import load_policy
from processor.demo.labelled import Labelled
from processor.demo.orders import order_label, order_signals, orders
from processor.demo.telemetry import reading_label, telemetry

POLICIES = Path(__file__).parents[2] / "policies"
GENERATORS: dict[str, Callable[[int], Iterator[Labelled]]] = {
    "orders": orders,
    "telemetry": telemetry,
}


@pytest.mark.parametrize("name", GENERATORS)
def test_a_seed_gives_the_same_stream_again(name: str) -> None:
    generate = GENERATORS[name]
    assert list(islice(generate(3), 300)) == list(islice(generate(3), 300))
    assert list(islice(generate(3), 300)) != list(islice(generate(4), 300))


@pytest.mark.parametrize("name", GENERATORS)
def test_events_are_valid_and_use_every_label(name: str) -> None:
    policy = load_policy(POLICIES / name)
    rows = list(islice(GENERATORS[name](5), 2000))
    for row in rows:
        policy.validate(row.event)
    assert {row.label for row in rows} == set(policy.label_names)


def test_events_are_independent_values() -> None:
    first, second = islice(orders(1), 2)
    first.event["items"].clear()
    assert second.event["items"]


def test_orders_have_a_realistic_mix() -> None:
    share = Counter(row.label for row in islice(orders(6), 3000))
    assert 0.70 < share["approve"] / 3000 < 0.82
    assert 0.06 < share["decline"] / 3000 < 0.14


def test_labels_follow_from_the_event() -> None:
    for row in islice(orders(7), 500):
        assert row.event["signals"] == order_signals(row.event)
        assert row.label == order_label(row.event)
    for row in islice(telemetry(7), 500):
        assert row.label == reading_label(row.event)


def test_an_item_costs_what_the_order_says() -> None:
    for row in islice(orders(8), 500):
        total = sum(item["quantity"] * item["price"] for item in row.event["items"])
        assert row.event["amount"] == pytest.approx(total)


def test_shifts_start_at_zero_and_alarms_are_rare() -> None:
    rows = list(islice(telemetry(9), 8000))
    assert rows[0].event["humidity_shift"] == rows[0].event["temperature_shift"] == 0
    alarms = sum(row.label == "alarm" for row in rows)
    assert 0 < alarms < 0.1 * len(rows)
