"""Where a partition is read from when no committed offset says so, or one says nonsense.

The client is told to ask (`auto.offset.reset=error`) instead of jumping by itself: its own policy
cannot tell a group that starts for the first time from one whose records were deleted under it,
and after an error while looking up offsets it has been seen to start at the wrong end.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from datetime import datetime

from processor.broker.transaction import TopicPartition
from processor.errors import ExitProcess

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Found:
    """What the broker says of a partition without a position. Offsets are next offsets."""

    position: int | None  # where we are, or what is committed
    start: int  # first offset that is left
    end: int  # last stable offset
    group_has_started: bool  # another partition of the topic has a committed offset


def first_start(setting: str) -> int | None:
    """Milliseconds since 1970 where the setting is a time; None for `earliest` and `latest`.

    Raises `ValueError` for anything else, a time without zone included.
    """
    if setting in ("earliest", "latest"):
        return None
    time = datetime.fromisoformat(setting)
    if time.tzinfo is None:
        raise ValueError("a time needs a zone")
    return int(time.timestamp() * 1000)


def starts_early(setting: str, found: Found) -> bool:
    """Whether a partition without a position is read from its beginning. So is one that was added
    to a topic that the group reads already, whatever the setting: what it holds is new."""
    return setting == "earliest" or found.group_has_started


def reset(policy: str, partition: TopicPartition, position: int, start: int) -> int:
    """How many records are lost where a position lies below the first record that is left.

    Raises `ExitProcess` where the policy is `error`: going on silently would pass over records.
    """
    what = f"{partition[0]}[{partition[1]}]: next offset is {position}"
    if position >= start:
        raise ExitProcess(f"{what}, which the log no longer reaches: its end was cut off")
    what += f", but records below {start} were deleted"
    if policy == "error":
        raise ExitProcess(f"{what}: set kafka.auto_offset_reset to earliest to go on without them")
    logger.error("%s: lost, going on at the %s", what, policy, extra={"action": "records_lost"})
    return start - position
