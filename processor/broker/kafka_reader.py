"""Reading topics from end to end, and auditing with that what a group has done.

An outsider reads: it joins no group and commits nothing, so a group at work does not notice.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import Any, TypeVar

from processor.broker.kafka import KafkaAdmin, client_partition, reading_consumer
from processor.broker.kafka_calls import reporting
from processor.broker.kafka_config import to_record
from processor.broker.kafka_ends import Which
from processor.broker.kafka_errors import classify, is_record
from processor.broker.transaction import TopicPartition
from processor.core.event import Record
from processor.core.outcome_log import InputLog, OutcomeLog
from processor.core.policy import PolicySpec
from processor.core.verify import Bounds, Committed, Gaps, Given, Verdict, outcome_of, verify
from processor.errors import BrokerError, ConfigError, ExitProcess, RetryCall
from processor.kafka_settings import KafkaSettings

CALL_S = 10.0
PAUSE_S = 0.1
FETCHED = 1000
AT_END, OUT_OF_RANGE = "_PARTITION_EOF", "_AUTO_OFFSET_RESET"

Progress = Callable[[str, int], None]  # a topic, and how many of its records were read
Answer = TypeVar("Answer")

logger = logging.getLogger(__name__)


class KafkaReader:
    """`timeout_s` bounds each wait by itself: for an answer, for a transaction to end, for the
    next record. Raises `ExitProcess` past it."""

    def __init__(
        self,
        settings: KafkaSettings,
        timeout_s: float,
        progress: Progress = lambda _topic, _records: None,
    ) -> None:
        self._settings = settings
        self._timeout_s = timeout_s
        self._progress = progress
        self._admin = KafkaAdmin(settings)
        self._consumer = reading_consumer(settings)

    def close(self) -> None:
        self._consumer.close()

    def partitions(self, *topics: str) -> list[TopicPartition]:
        """Raises `ConfigError` where the cluster does not answer or a topic is missing."""
        try:
            found, _ = self._admin.topics(CALL_S)
        except BrokerError as error:
            servers = self._settings.bootstrap_servers
            remedy = f"no answer in {CALL_S:.0f} s: {error}"
            raise ConfigError("kafka", "bootstrap_servers", servers, remedy) from error
        if missing := sorted(set(topics) - set(found)):
            remedy = "no such topics: nothing to verify"
            raise ConfigError("kafka", "topics", ", ".join(missing), remedy)
        return [
            (topic, number) for topic in dict.fromkeys(topics) for number in range(found[topic])
        ]

    def compacted(self, *topics: str) -> bool:
        """Whether one of them may have given up records of its middle; False where it may not be
        asked."""
        try:
            configs = self._admin.configs("topic", topics, CALL_S)
        except BrokerError as error:
            logger.warning("cleanup policies are not known: %s", error)
            return False
        return any("compact" in config.get("cleanup.policy", "") for config in configs)

    def committed(self, partitions: Collection[TopicPartition]) -> Committed:
        """Of one topic. Waits for transactions that are being ended: what they commit belongs to
        the outcomes that can be read."""

        def ask() -> Committed:
            with reporting("committed"):
                asked = [client_partition(*partition) for partition in partitions]
                found = self._consumer.committed(asked, min(CALL_S, self._timeout_s))
            for answer in found:
                if answer.error is not None:
                    raise classify(answer.error, "committed")
            return {p.partition: p.offset if p.offset >= 0 else None for p in found}

        return self._patiently(ask, f"offsets of group {self._settings.group}")

    def offsets(
        self, partitions: Collection[TopicPartition], which: Which
    ) -> dict[TopicPartition, int]:
        def ask() -> dict[TopicPartition, int]:
            with reporting("list_offsets"):
                futures = self._admin.offsets(partitions, which)
                return {
                    (p.topic, p.partition): future.result(CALL_S).offset
                    for p, future in futures.items()
                }

        return self._patiently(ask, f"{which} offsets") if partitions else {}

    def settled_ends(self, partitions: Collection[TopicPartition]) -> dict[TopicPartition, int]:
        """Where the logs end now, once no transaction is open below.

        What a group had committed before this call is readable below these ends after it: a
        producer flushes before it commits, so the records are in the log, and only the marker
        that makes them readable may still be missing."""
        ends = self.offsets(partitions, "last")
        deadline = time.monotonic() + self._timeout_s
        while True:
            stable = self.offsets(partitions, "stable")
            open_ = [p for p, end in ends.items() if stable[p] < end]
            if not open_:
                return ends
            if time.monotonic() >= deadline:
                topic, number = open_[0]
                raise ExitProcess(
                    f"{topic}[{number}]: a transaction has been open at offset "
                    f"{stable[open_[0]]} for {self._timeout_s:.0f} s: end it (start its producer "
                    "again, or wait for its time-out) or raise --timeout"
                )
            time.sleep(PAUSE_S)

    def read(self, ends: Mapping[TopicPartition, int]) -> Iterator[Record]:
        """All committed records below these ends, in order per partition.

        A partition is done when the position has reached the end, and not after a certain
        record: the last offsets may be those of control markers or aborted records."""
        left = {p: end for p, end in ends.items() if end > 0}
        if not left:
            return
        first = self.offsets(left, "first")
        self._consumer.incremental_assign(
            [client_partition(*p, offset) for p, offset in first.items()]
        )
        counts: dict[str, int] = {}
        heard = time.monotonic()
        while left:
            with reporting("consume"):
                messages = self._consumer.consume(FETCHED, 0.2)
            for message in messages:
                record = self._take(message, left)
                if record is not None:
                    counts[record.topic] = counts.get(record.topic, 0) + 1
                    yield record
            for topic, count in counts.items():
                self._progress(topic, count)
            now = time.monotonic()
            heard = now if messages else heard
            if now - heard >= self._timeout_s:
                topic, number = next(iter(left))
                raise ExitProcess(f"{topic}[{number}]: no record in {self._timeout_s:.0f} s")
        self._consumer.unassign()

    def _take(self, message: Any, left: dict[TopicPartition, int]) -> Record | None:
        """The record, if it is one below the end; a partition whose end is reached is left."""
        partition = str(message.topic()), int(message.partition() or 0)
        end = left.get(partition)
        if end is None:
            return None
        error = message.error()
        name = "" if error is None else error.name()
        if name == OUT_OF_RANGE:  # deleted while we read: go on with what is there
            [first] = self.offsets([partition], "first").values()
            # The client has stopped this partition, and would refuse a seek.
            self._consumer.incremental_unassign([client_partition(*partition)])
            self._consumer.incremental_assign([client_partition(*partition, first)])
            return None
        if name not in ("", AT_END) and not is_record(message):
            return None
        if message.offset() >= end:
            del left[partition]
        return to_record(message) if not name and message.offset() < end else None

    def _patiently(self, ask: Callable[[], Answer], what: str) -> Answer:
        deadline = time.monotonic() + self._timeout_s
        while True:
            try:
                return ask()
            except RetryCall as error:
                if time.monotonic() >= deadline:
                    raise ExitProcess(
                        f"{what}: not known after {self._timeout_s:.0f} s: {error}"
                    ) from error
                time.sleep(PAUSE_S)


def audit(
    reader: KafkaReader,
    policy: PolicySpec,
    listed: Iterable[Given] | None = None,
    started_late: bool = False,
    reported: Collection[str] = (),
) -> Verdict:
    """Audit one policy. The order of the steps is what `core.verify` rests on.

    `listed`: the input records, where they are not to be read from the topic. `reported`: topics
    shared with another policy, whose foreign records have been reported with that one.
    """
    topics = policy.topics
    before = reader.committed(reader.partitions(topics.input))
    outputs = reader.partitions(topics.output, topics.dead_letter)
    log = OutcomeLog()
    for record in reader.read(reader.settled_ends(outputs)):
        outcome = outcome_of(record)
        own = outcome.input_topic == topics.input
        if own or (outcome.kind == "foreign" and record.topic not in reported):
            log.append(outcome)
    inputs = reader.partitions(topics.input)  # again: a group takes up new ones within seconds
    after = reader.committed(inputs)
    stable = reader.offsets(inputs, "stable")
    given = read_input(reader, policy, stable) if listed is None else listed
    first = reader.offsets(inputs, "first")  # after reading: what was deleted meanwhile is below
    bounds: Bounds = {place[1]: (first[place], end) for place, end in stable.items()}
    gaps = Gaps(
        outputs=frozenset(p for p, low in reader.offsets(outputs, "first").items() if low > 0),
        compacted=reader.compacted(topics.output, topics.dead_letter),
        started_late=started_late,
        given=listed is not None or reader.compacted(topics.input),
    )
    return verify(topics.input, given, log, before, bounds, after, gaps)


def read_input(
    reader: KafkaReader, policy: PolicySpec, ends: Mapping[TopicPartition, int]
) -> InputLog:
    log, skips = InputLog(), policy.event.tombstones == "skip"
    for record in reader.read(ends):
        log.append(Given(record.partition, record.offset, skips and record.value is None))
    return log
