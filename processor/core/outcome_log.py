"""What is read before the verifier can begin, held in few bytes per record."""

from __future__ import annotations

from array import array
from collections.abc import Iterator

from processor.core.verify import Given, Kind, Published


class OutcomeLog:
    """Outcomes in their order, in 24 bytes each: what many of them share is kept once."""

    def __init__(self) -> None:
        self._shared: dict[tuple[str, int, str, int, Kind], int] = {}
        self._rows = array("q")

    def append(self, outcome: Published) -> None:
        topic, partition, offset, input_topic, input_partition, input_offset, kind = outcome
        shared = (topic, partition, input_topic, input_partition, kind)
        number = self._shared.setdefault(shared, len(self._shared))
        self._rows.extend((number, offset, input_offset))

    def __iter__(self) -> Iterator[Published]:
        shared, rows = list(self._shared), iter(self._rows)
        for number, offset, input_offset in zip(rows, rows, rows, strict=True):
            topic, partition, input_topic, input_partition, kind = shared[number]
            yield Published(
                topic, partition, offset, input_topic, input_partition, input_offset, kind
            )


class InputLog:
    """Input records in their order, in 24 bytes each."""

    def __init__(self) -> None:
        self._rows = array("q")

    def append(self, record: Given) -> None:
        self._rows.extend(map(int, record))

    def __iter__(self) -> Iterator[Given]:
        rows = iter(self._rows)
        for partition, offset, skipped in zip(rows, rows, rows, strict=True):
            yield Given(partition, offset, bool(skipped))
