"""A synthetic stream of one sensor's readings, some of them during a disturbance.

Every label follows from the event by the rules that the policy's prefix states.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from random import Random
from statistics import median

from processor.demo.labelled import Event, Labelled


def telemetry(seed: int) -> Iterator[Labelled]:
    """Endless readings of one sensor, five seconds apart; now and then steam or heat reaches it.

    About 3 % are to alarm. A reading's shift is its distance from the median of the hour before.
    """
    random = Random(seed)
    humidity: list[float] = []
    temperature: list[float] = []
    excursion = _Excursion()
    for number in range(10**9):
        hour = number / 720
        if not excursion.left and number > 120 and random.random() < 0.001:
            excursion = _Excursion.drawn(random)
        h = 46 + 2 * math.sin(hour / 3) + random.gauss(0, 0.15) + excursion.humidity()
        t = 27.5 + math.sin(hour / 4 + 1) + random.gauss(0, 0.03) + excursion.temperature()
        excursion = excursion.next()
        event = _reading(number, h, t, humidity, temperature)
        humidity = [*humidity[-719:], h]
        temperature = [*temperature[-719:], t]
        yield Labelled(event["sensor"], event, reading_label(event))


def reading_label(event: Event) -> str:
    """The decision that the rules of the policy `telemetry` demand."""
    alarm = event["humidity_shift"] >= 5 or abs(event["temperature_shift"]) >= 2
    return "alarm" if alarm else "normal"


def _reading(number: int, h: float, t: float, hs: list[float], ts: list[float]) -> Event:
    return {
        "sensor": "synthetic-1",
        "reading": number,
        "humidity": round(h, 2),
        "temperature": round(t, 2),
        "humidity_shift": round(h - median(hs or [h]), 2),
        "temperature_shift": round(t - median(ts or [t]), 2),
    }


@dataclass(frozen=True, slots=True)
class _Excursion:
    """A disturbance that rises for a quarter of its length and decays for the rest."""

    steam: float = 0.0
    heat: float = 0.0
    length: int = 0
    left: int = 0

    @classmethod
    def drawn(cls, random: Random) -> _Excursion:
        length = random.randint(15, 60)
        return cls(random.uniform(8, 40), random.uniform(0, 15), length, length)

    def next(self) -> _Excursion:
        return _Excursion(self.steam, self.heat, self.length, max(0, self.left - 1))

    def humidity(self) -> float:
        return self.steam * self._strength()

    def temperature(self) -> float:
        return self.heat * self._strength()

    def _strength(self) -> float:
        if not self.left:
            return 0.0
        passed = 1 - self.left / self.length
        return passed / 0.25 if passed < 0.25 else (1 - passed) / 0.75
