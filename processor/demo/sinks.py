"""Where generated events go: standard output, a file, a topic; at a given rate."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import BinaryIO

import orjson

from processor.config import KafkaSettings
from processor.demo.labelled import Labelled
from processor.demo.orders import orders
from processor.demo.telemetry import telemetry
from processor.errors import ConfigError

STREAMS = {"orders": orders, "telemetry": telemetry}


def write_events(
    events: Iterable[Labelled],
    to: str,
    count: int | None,
    rate: float,
    with_labels: bool,
    kafka: KafkaSettings | None,
) -> None:
    """Write events until `count` or an interrupt. `to`: `-`, a file, or `topic:NAME`."""
    paced = _paced(islice(events, count), rate)
    try:
        if kafka is not None:
            from processor.broker.kafka_load import produce_all

            records = ((e.key.encode(), _value(e, with_labels), ()) for e in paced)
            produce_all(kafka, to.removeprefix("topic:"), records)
            return None
        if to == "-":
            return _write_lines(sys.stdout.buffer, paced, with_labels)
        with _opened(to) as stream:
            _write_lines(stream, paced, with_labels)
    except (KeyboardInterrupt, BrokenPipeError):
        pass  # how one stops a stream without an end


def _opened(file: str) -> BinaryIO:
    try:
        return Path(file).open("wb")
    except OSError as error:
        raise ConfigError("generate", "--to", file, error.strerror or "cannot be written") from None


def _write_lines(stream: BinaryIO, events: Iterable[Labelled], with_labels: bool) -> None:
    for event in events:
        stream.write(_value(event, with_labels) + b"\n")
        stream.flush()


def _value(item: Labelled, with_label: bool) -> bytes:
    if not with_label:
        return orjson.dumps(item.event)
    return orjson.dumps({"key": item.key, "event": item.event, "label": item.label})


def _paced(events: Iterable[Labelled], rate: float) -> Iterator[Labelled]:
    """Each event at its own time since the start, so that a late one does not delay the rest."""
    begun = time.monotonic()
    for number, event in enumerate(events):
        if rate and (wait := begun + number / rate - time.monotonic()) > 0:
            time.sleep(wait)
        yield event
