"""The input of the soak: bursts of events, some in transactions of which every other is aborted,
and a manifest of what the brokers have acknowledged."""

from __future__ import annotations

import json
import threading
import time
from pathlib import Path

from confluent_kafka import KafkaError, Message, Producer

from tests.runtime.world import DAMAGED, event

IN_TRANSACTIONS = 5  # one of so many bursts' fifths
DAMAGED_EVERY = 50
FLUSH_S = 120.0


class Feed:
    """Writes `events` records in bursts, in a thread of its own."""

    def __init__(
        self, address: str, topic: str, partitions: int, events: int, bursts: int, every_s: float
    ) -> None:
        client = {"bootstrap.servers": address, "enable.idempotence": True, "log_level": 3}
        self._plain = Producer(client)
        self._transactional = Producer(client | {"transactional.id": f"feed-{topic}"})
        self._topic, self._partitions = topic, partitions
        self._events, self._bursts, self._every_s = events, bursts, every_s
        self._number = 0
        self.acknowledged: list[tuple[int, int]] = []
        self.begun: list[float] = []  # of each burst
        self.failures: list[str] = []
        self._thread = threading.Thread(target=self._run, daemon=True)

    def start(self) -> None:
        self._thread.start()

    @property
    def ended(self) -> bool:
        return not self._thread.is_alive()

    def write_manifest(self, file: Path) -> None:
        with file.open("w") as lines:
            for partition, offset in self.acknowledged:
                what = {"topic": self._topic, "partition": partition, "offset": offset}
                lines.write(json.dumps(what) + "\n")

    def _run(self) -> None:
        try:
            self._transactional.init_transactions(FLUSH_S)
            start = time.monotonic()
            for burst in range(self._bursts):
                time.sleep(max(0.0, start + burst * self._every_s - time.monotonic()))
                self.begun.append(time.time())
                self._burst(burst)
        except Exception as error:
            self.failures.append(repr(error))

    def _burst(self, burst: int) -> None:
        last = self._events * (burst + 1) // self._bursts
        in_transaction = (last - self._number) // IN_TRANSACTIONS
        self._write(self._plain, last - self._number - in_transaction)
        if self._plain.flush(FLUSH_S):
            self.failures.append("not all of a burst was delivered")
        self._transaction(in_transaction, commit=True)
        if burst % 2:
            self._transaction(100, commit=False)

    def _transaction(self, count: int, commit: bool) -> None:
        producer, before = self._transactional, len(self.acknowledged)
        number = self._number
        producer.begin_transaction()
        self._write(producer, count)
        if commit:
            producer.commit_transaction(FLUSH_S)
        else:
            producer.flush(FLUSH_S)
            producer.abort_transaction(FLUSH_S)
            del self.acknowledged[before:]
            self._number = number

    def _write(self, producer: Producer, count: int) -> None:
        for _ in range(count):
            n = self._number
            damaged = n % DAMAGED_EVERY == 7
            value = DAMAGED[n // DAMAGED_EVERY % len(DAMAGED)][0] if damaged else event(n)
            key, partition = b"%d" % n, n % self._partitions
            while True:
                try:
                    producer.produce(
                        self._topic, value, key, partition, on_delivery=self._delivered
                    )
                    break
                except BufferError:
                    producer.poll(0.1)
            producer.poll(0)
            self._number += 1

    def _delivered(self, error: KafkaError | None, message: Message) -> None:
        if error is not None:
            self.failures.append(str(error))
        else:
            self.acknowledged.append((message.partition() or 0, message.offset() or 0))
