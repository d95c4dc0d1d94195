"""Settings of the Kafka client, and the relations that hold between its times."""

from __future__ import annotations

import platform
import re
from datetime import datetime
from typing import Annotated, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from processor.client_properties import ClientProperties
from processor.documents import refusal

# What one round of the worker may take in the worst case: start a producer, look offsets up,
# publish and abort, each within the budget of a publication.
STEP_BUDGETS = 4

Milliseconds = Annotated[int, Field(ge=1, le=2**31 - 1)]
# Ids must need no quoting anywhere: in Kafka's access rules, in metrics, in a shell.
Id = Annotated[str, Field(pattern=r"^[A-Za-z0-9._-]{1,200}$")]


def _host_ordinal() -> str:
    """The ordinal that a StatefulSet puts at the end of its pods' names."""
    found = re.search(r"-(\d+)$", platform.node().split(".")[0])
    return found[1] if found else "0"


class Section(BaseModel):
    """Settings that belong together. Unknown keys are refused."""

    # The input is hidden in errors, for it may hold a secret; `load_settings` shows it masked.
    model_config = ConfigDict(
        extra="forbid", frozen=True, strict=True, allow_inf_nan=False, hide_input_in_errors=True
    )


class KafkaSettings(Section):
    """The cluster, and this replica's place in its consumer group."""

    bootstrap_servers: Annotated[str, Field(pattern=r"^\S+$")] = "localhost:9092"
    group: Id = "processor"
    replica: Annotated[
        Id, Field(description="stable name of this replica; default: the host name's ordinal or 0")
    ] = Field(default_factory=_host_ordinal)
    transactional_id_prefix: Id = "processor"
    group_protocol: Annotated[
        Literal["classic", "consumer"],
        Field(description="consumer: KIP-848, the broker assigns; needs Kafka 4.0"),
    ] = "classic"
    static_membership: Annotated[
        bool | None,
        Field(
            description="a restart within the session keeps the partitions; default: true with "
            "the classic protocol, false with the other, which lets no member back before its "
            "session has ended"
        ),
    ] = None
    session_timeout_ms: Annotated[
        Milliseconds, Field(description="of the classic protocol; of the other, the broker has it")
    ] = 12_000
    max_poll_interval_ms: Milliseconds = 300_000
    transaction_timeout_ms: Annotated[
        Milliseconds, Field(description="brokers refuse more than 15 minutes unless told otherwise")
    ] = 30_000
    retry_backoff_ms: Milliseconds = 5
    publish_timeout_ms: Annotated[
        Milliseconds, Field(description="budget of all calls of one transaction")
    ] = 10_000
    first_start: Annotated[
        str,
        Field(
            description="where a group without committed offsets starts: earliest, latest, or a "
            "time with zone (2026-01-31T12:00:00Z)"
        ),
    ] = "earliest"
    auto_offset_reset: Annotated[
        Literal["error", "earliest", "latest"],
        Field(
            description="what to do where records were deleted before we read them: stop, or go "
            "on with what is left and count the loss"
        ),
    ] = "error"
    client: Annotated[
        ClientProperties, Field(description="further librdkafka properties: security and the like")
    ] = {}

    @property
    def transactional_id(self) -> str:
        """Stable per replica: a restarted one aborts its dead predecessor's transaction at once."""
        return f"{self.transactional_id_prefix}-{self.group}-{self.replica}"

    @property
    def group_instance_id(self) -> str | None:
        static = self.static_membership
        static = self.group_protocol == "classic" if static is None else static
        return self.transactional_id if static else None

    @model_validator(mode="after")
    def _start_is_known(self) -> Self:
        if self.first_start not in ("earliest", "latest"):
            try:
                zone = datetime.fromisoformat(self.first_start).tzinfo
            except ValueError:
                zone = None
            if zone is None:
                remedy = "use earliest, latest or a time with zone (2026-01-31T12:00:00Z)"
                raise refusal("first_start", self.first_start, remedy)
        return self

    @model_validator(mode="after")
    def _timeouts_fit(self) -> Self:
        session, poll = self.session_timeout_ms, self.max_poll_interval_ms
        transaction, publish = self.transaction_timeout_ms, self.publish_timeout_ms
        if self.group_protocol == "classic" and session >= poll:
            raise refusal(
                "session_timeout_ms", session, f"must be below max_poll_interval_ms = {poll}"
            )
        if transaction < 2 * publish:
            remedy = f"raise it to {2 * publish}, twice publish_timeout_ms, or lower that"
            raise refusal("transaction_timeout_ms", transaction, remedy)
        if poll <= STEP_BUDGETS * publish:
            remedy = f"raise it above {STEP_BUDGETS * publish}, {STEP_BUDGETS} publish_timeout_ms"
            raise refusal("max_poll_interval_ms", poll, remedy)
        if transaction > 900_000:
            remedy = "lower it to 900000: brokers refuse more (transaction.max.timeout.ms)"
            raise refusal("transaction_timeout_ms", transaction, remedy)
        return self
