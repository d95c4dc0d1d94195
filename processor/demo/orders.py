"""A synthetic stream of a shop's orders.

Every label follows from the event by the rules that the policy's prefix states, so that whoever
can read the rules can be right about every event.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from random import Random

from processor.demo.labelled import Event, Labelled


@dataclass(frozen=True, slots=True)
class _Product:
    name: str
    category: str
    price: float


_PRODUCTS = (
    _Product("paperback novel", "books", 12.9),
    _Product("cookery book", "books", 28.0),
    _Product("atlas of birds", "books", 45.0),
    _Product("linen shirt", "clothing", 49.9),
    _Product("running shoes", "clothing", 119.0),
    _Product("winter coat", "clothing", 189.0),
    _Product("headphones", "electronics", 149.0),
    _Product("tablet", "electronics", 429.0),
    _Product("smartphone", "electronics", 799.0),
    _Product("gift card 50", "gift_card", 50.0),
    _Product("gift card 100", "gift_card", 100.0),
    _Product("coffee beans", "groceries", 17.5),
    _Product("olive oil", "groceries", 14.0),
    _Product("desk lamp", "home", 39.0),
    _Product("kettle", "home", 55.0),
    _Product("wooden blocks", "toys", 24.0),
    _Product("board game", "toys", 36.0),
)
_SAFE = tuple(p for p in _PRODUCTS if p.category != "gift_card" and p.price < 150)
_CITIES = {
    "DE": ("Hamburg", "Leipzig", "Bremen"),
    "ES": ("Sevilla", "Bilbao"),
    "FR": ("Lyon", "Nantes", "Lille"),
    "IT": ("Torino", "Bologna"),
    "NL": ("Utrecht", "Delft"),
    "PL": ("Gdynia", "Lublin"),
}
_STREETS = ("Station Road", "Mill Lane", "Harbour Street", "Park Avenue", "Church Street")
_START = datetime(2026, 1, 5, 6, tzinfo=UTC)


def orders(seed: int) -> Iterator[Labelled]:
    """An endless stream of orders, about 76 % to approve, 14 % to review and 10 % to decline."""
    random = Random(seed)
    time = _START
    for number in range(10**9):
        time += timedelta(seconds=round(random.expovariate(1 / 20)))
        event = _ordinary_order(random, number, time)
        change = random.choices(_CHANGES, _WEIGHTS)[0]
        change(random, event)
        event["signals"] = order_signals(event)
        yield Labelled(event["order_id"], event, order_label(event))


def order_signals(event: Event) -> list[str]:
    """What a checkout notices in the other fields, by the definitions of the policy `orders`;
    the gravest come last."""
    customer, velocity, match = event["customer"], event["velocity"], event["address"]["match"]
    kind, amount = event["device"]["kind"], event["amount"]
    cards = sum(i["quantity"] for i in event["items"] if i["category"] == "gift_card")
    foreign, young = match == "other country", customer["account_days"] < 30
    noticed = {
        "known device: low": kind == "known",
        "new device: low": kind == "new",
        "gift address: low": match == "same country",
        "other country: low": foreign and not young,
        "large amount: medium": amount > 1000,
        "new device with electronics: medium": kind == "new" and 300 < amount <= 1000,
        "bulk gift cards: medium": cards >= 5,
        "forwarding address: medium": match == "forwarder",
        "proxy network: medium": event["device"]["network"] == "proxy",
        "emulator: high": kind == "emulator",
        "young account abroad: high": foreign and young,
        "refund abuse: high": customer["refunds"] >= max(5, customer["orders"] / 2),
        "order burst: high": velocity["orders"] >= 10,
        "card testing: high": velocity["cards"] >= 4,
    }
    return [signal for signal, holds in noticed.items() if holds]


def order_label(event: Event) -> str:
    """The decision that the rules of the policy `orders` demand."""
    gravest = event["signals"][-1].split(": ")[1]
    return {"low": "approve", "medium": "review", "high": "decline"}[gravest]


def _ordinary_order(random: Random, number: int, time: datetime) -> Event:
    country = random.choice(sorted(_CITIES))
    home = _address(random, country)
    placed = random.randint(1, 60)
    event = {
        "order_id": f"A{100000 + number}",
        "placed_at": time.isoformat().replace("+00:00", "Z"),
        "amount": 0.0,
        "items": [
            _item(p, random.randint(1, 2)) for p in random.sample(_SAFE, random.choice((1, 2)))
        ],
        "address": {"billing": home, "shipping": home, "match": "same"},
        "device": {
            "kind": random.choices(("known", "new"), (9, 1))[0],
            "network": random.choice(("home", "mobile", "office")),
            "os": random.choice(("android", "ios", "windows", "macos")),
        },
        "customer": {
            "account_days": random.randint(60, 2500),
            "orders": placed,
            "refunds": random.randint(0, min(3, placed // 6)),
            "average_amount": round(random.uniform(25, 140), 2),
        },
        "velocity": {"orders": random.choices((1, 2), (9, 1))[0], "cards": 1},
    }
    return _priced(event)


def _address(random: Random, country: str) -> str:
    city = random.choice(_CITIES[country])
    return f"{random.randint(1, 99)} {random.choice(_STREETS)}, {city}, {country}"


def _item(product: _Product, quantity: int) -> Event:
    return {
        "name": product.name,
        "category": product.category,
        "quantity": quantity,
        "price": product.price,
    }


def _priced(event: Event) -> Event:
    event["amount"] = round(sum(i["quantity"] * i["price"] for i in event["items"]), 2)
    return event


def _nothing(random: Random, event: Event) -> None:
    pass


def _gift_to_a_friend(random: Random, event: Event) -> None:
    country = event["address"]["billing"][-2:]
    event["address"] |= {"shipping": _address(random, country), "match": "same country"}


def _gift_abroad(random: Random, event: Event) -> None:
    _to_other_country(random, event)
    event["customer"]["account_days"] = random.randint(200, 2500)


def _known_big_spender(random: Random, event: Event) -> None:
    event["items"] = [_item(_PRODUCTS[7], random.randint(1, 2))]
    event["device"]["kind"] = "known"
    _priced(event)


def _forwarder(random: Random, event: Event) -> None:
    event["address"] |= {"shipping": "Parcel forwarding, Unit 7, Venlo, NL", "match": "forwarder"}


def _proxy(random: Random, event: Event) -> None:
    event["device"]["network"] = "proxy"


def _gift_cards(random: Random, event: Event) -> None:
    event["items"] = [_item(_PRODUCTS[random.choice((9, 10))], random.randint(5, 9))]
    _priced(event)


def _large_amount(random: Random, event: Event) -> None:
    event["items"] = [_item(_PRODUCTS[8], random.randint(2, 4))]
    _priced(event)


def _new_device_for_electronics(random: Random, event: Event) -> None:
    event["items"] = [_item(_PRODUCTS[random.choice((7, 8))], 1)]
    event["device"]["kind"] = "new"
    _priced(event)


def _emulator(random: Random, event: Event) -> None:
    event["device"] |= {"kind": "emulator", "os": "android"}


def _card_testing(random: Random, event: Event) -> None:
    cards = random.randint(4, 12)
    event["velocity"] = {"orders": random.randint(cards, 3 * cards), "cards": cards}


def _order_burst(random: Random, event: Event) -> None:
    event["velocity"]["orders"] = random.randint(10, 40)


def _refund_abuse(random: Random, event: Event) -> None:
    refunds = random.randint(5, 14)
    event["customer"] |= {"refunds": refunds, "orders": random.randint(refunds, 2 * refunds)}


def _young_account_abroad(random: Random, event: Event) -> None:
    _to_other_country(random, event)
    event["customer"] |= {"account_days": random.randint(0, 20), "orders": 1, "refunds": 0}


def _to_other_country(random: Random, event: Event) -> None:
    others = sorted(set(_CITIES) - {event["address"]["billing"][-2:]})
    event["address"]["shipping"] = _address(random, random.choice(others))
    event["address"]["match"] = "other country"


_Change = Callable[[Random, Event], None]
_SCENARIOS: dict[_Change, float] = {
    _nothing: 52,
    _gift_to_a_friend: 12,
    _gift_abroad: 4,
    _known_big_spender: 8,
    _forwarder: 3,
    _proxy: 3,
    _gift_cards: 3,
    _large_amount: 2,
    _new_device_for_electronics: 3,
    _emulator: 2,
    _card_testing: 2,
    _order_burst: 2,
    _refund_abuse: 2,
    _young_account_abroad: 2,
}
_CHANGES, _WEIGHTS = tuple(_SCENARIOS), tuple(_SCENARIOS.values())
