"""Events together with the right answer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

Event = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Labelled:
    """An event with its record key and the label that is right for it."""

    key: str
    event: Event
    label: str
