"""What the client's errors ask us to do.

Told apart by name and flags, so that it can be read and tested without the client. The names are
those of Kafka's protocol; with an underscore in front, librdkafka's own.
"""

from __future__ import annotations

import logging
import re
from typing import Any, Protocol

from processor.errors import (
    AbortAndRewind,
    BrokerError,
    ExitProcess,
    RebuildProducer,
    RetryCall,
    ShrinkOutput,
)

logger = logging.getLogger(__name__)

_PRODUCED_TO = re.compile(r"ProduceRequest for (\S+) \[")
_SEVERAL = re.compile(r" with (?!1 )\d+ message")


class ClientError(Protocol):
    def name(self) -> str: ...
    def str(self) -> str: ...
    def fatal(self) -> bool: ...
    def retriable(self) -> bool: ...
    def txn_requires_abort(self) -> bool: ...


# Settings and permissions: another try changes nothing.
EXIT = {
    "CLUSTER_AUTHORIZATION_FAILED",
    "GROUP_AUTHORIZATION_FAILED",
    "INVALID_TRANSACTION_TIMEOUT",
    "TOPIC_AUTHORIZATION_FAILED",
    "TRANSACTIONAL_ID_AUTHORIZATION_FAILED",
    "UNSUPPORTED_VERSION",
}
# The producer is lost, whatever the flags say: measured with one injected error per call, some
# fences come as abortable, and every transaction after them fails.
REBUILD = {
    "INVALID_PRODUCER_EPOCH",
    "INVALID_PRODUCER_ID_MAPPING",
    "INVALID_TXN_STATE",
    "OUT_OF_ORDER_SEQUENCE_NUMBER",
    "PRODUCER_FENCED",
    "TRANSACTION_COORDINATOR_FENCED",
    "UNKNOWN_PRODUCER_ID",
    "_FATAL",
    "_FENCED",
}
# Refused before it was written, by the client or by the broker. The client calls the second one
# abortable, but has then skipped a sequence number, and every transaction after it fails.
TOO_LARGE = {"MSG_SIZE_TOO_LARGE", "RECORD_LIST_TOO_LARGE"}
# What the client says of offsets that were still to be sent when their transaction failed for a
# cause of its own. The same call again sends nothing, and reports that cause.
HIDES_CAUSE = "_STATE"
# Trouble that the client gets over by itself; a call made meanwhile is made again.
PASSING = {
    "COORDINATOR_LOAD_IN_PROGRESS",
    "COORDINATOR_NOT_AVAILABLE",
    "LEADER_NOT_AVAILABLE",
    "NOT_COORDINATOR",
    "NOT_LEADER_FOR_PARTITION",
    "REQUEST_TIMED_OUT",
    "UNSTABLE_OFFSET_COMMIT",
    "_ALL_BROKERS_DOWN",
    "_QUEUE_FULL",
    "_RESOLVE",
    "_TIMED_OUT",
    "_TRANSPORT",
    "_WAIT_COORD",
}
# What a member hears about its group and answers by joining again, by itself.
REJOINS = {
    "ILLEGAL_GENERATION",
    "REBALANCE_IN_PROGRESS",
    "UNKNOWN_MEMBER_ID",
    "_MAX_POLL_EXCEEDED",
    "_PARTITION_EOF",
}


def classify(error: ClientError, call: str) -> BrokerError:
    """The error by what is to be done about it; of no known kind: exit."""
    name = error.name()
    text = f"{call}: {name}: {error.str()}"
    if name in EXIT:
        return ExitProcess(text)
    if name in TOO_LARGE:
        return ShrinkOutput(text, topic[1] if (topic := _PRODUCED_TO.search(text)) else None)
    if error.fatal() or name in REBUILD:
        return RebuildProducer(text)
    if error.txn_requires_abort():
        return RetryCall(text) if name == HIDES_CAUSE else AbortAndRewind(text)
    if error.retriable() or name in PASSING:
        return RetryCall(text)
    return ExitProcess(text)


def of_several(refused: ShrinkOutput) -> bool:
    """Whether it was a batch of several records that was too large."""
    return bool(_SEVERAL.search(str(refused)))


def consumer_error(error: ClientError, where: str) -> ExitProcess | None:
    """None for what the client gets over by itself. A consumer that is lost is not rebuilt: the
    group has to forget this member, and a restart does that best."""
    if not error.fatal() and error.name() in REJOINS:
        logger.info("%s: %s", where, error, extra={"action": "rejoin"})
        return None
    kind = classify(error, where)
    if isinstance(kind, RetryCall):
        logger.warning("%s", kind, extra={"action": "wait"})
        return None
    return ExitProcess(str(kind))


def is_record(message: Any) -> bool:
    """Whether it is one, and not news: raises `ExitProcess` for news that we cannot live with.

    A record without a value is false as a condition, so messages are compared with None.
    """
    error = message.error()
    if error is None:
        return True
    if (serious := consumer_error(error, f"consumer of {message.topic()}")) is not None:
        raise serious
    return False
