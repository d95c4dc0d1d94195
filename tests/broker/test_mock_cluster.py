"""What our own calls come to when a broker answers with an error, or does not answer.

The rows are the errors that a broker can give to a transactional producer. What they assert is
our outcome, and that the next transaction publishes; the names that the client finds for one and
the same mishap depend on the moment, and are not asserted.
"""

from __future__ import annotations

import struct
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from typing import Any

import pytest

from processor.broker.kafka import KafkaSink
from processor.broker.kafka_config import DEFAULT_MAX_BYTES
from processor.broker.transaction import GroupMetadata, State, Transactions, check_member
from processor.core.encode import OutputRecord
from processor.errors import (
    AbortAndRewind,
    BrokerError,
    ExitProcess,
    RebuildProducer,
    ShrinkOutput,
)
from tests.broker.mock_cluster import PATIENCE_S, Api, MockCluster, joining, settings

IN, OUT = "in", "out"
OFFSETS = {(IN, 0): 1}
OUTPUT = [OutputRecord(OUT, b"key", b"value", ())]
# By number, as the table of measured errors has them: what the broker answers, one per request.
TIMED_OUT, NOT_LEADER, LOADING, NOT_COORDINATOR = 7, 6, 14, 16
TOO_LARGE, GENERATION, MEMBER, GROUP_DENIED = 10, 22, 25, 30
SEQUENCE, EPOCH, TXN_STATE, CONCURRENT, ID_DENIED = 45, 47, 48, 51, 53
OF_NO_KNOWN_KIND, INSTANCE, FENCED = 67, 82, 90

PUBLISHED = None
Row = tuple[Api, tuple[int, ...], type[BrokerError] | None]
ROWS: list[Row] = [
    (Api.Produce, (TIMED_OUT,), PUBLISHED),
    (Api.Produce, (NOT_LEADER, NOT_LEADER), PUBLISHED),
    (Api.Produce, (SEQUENCE,), RebuildProducer),
    (Api.Produce, (EPOCH,), RebuildProducer),
    # Abortable, says the client, and then fails the next transaction: sequence numbers were
    # skipped. So it is with a record that is too large.
    (Api.Produce, (FENCED,), RebuildProducer),
    (Api.Produce, (TOO_LARGE,), ShrinkOutput),
    (Api.AddPartitionsToTxn, (CONCURRENT, CONCURRENT), PUBLISHED),
    (Api.AddPartitionsToTxn, (EPOCH,), RebuildProducer),
    (Api.AddPartitionsToTxn, (FENCED,), RebuildProducer),
    (Api.AddOffsetsToTxn, (NOT_COORDINATOR,), PUBLISHED),
    (Api.AddOffsetsToTxn, (GROUP_DENIED,), ExitProcess),
    (Api.TxnOffsetCommit, (GENERATION,), AbortAndRewind),
    (Api.TxnOffsetCommit, (MEMBER,), AbortAndRewind),
    (Api.TxnOffsetCommit, (INSTANCE,), AbortAndRewind),
    (Api.TxnOffsetCommit, (LOADING, LOADING), PUBLISHED),
    (Api.EndTxn, (LOADING,), PUBLISHED),
    (Api.EndTxn, (CONCURRENT,), PUBLISHED),
    (Api.EndTxn, (EPOCH,), RebuildProducer),
    (Api.EndTxn, (FENCED,), RebuildProducer),
    (Api.EndTxn, (TXN_STATE,), RebuildProducer),
    (Api.EndTxn, (OF_NO_KNOWN_KIND,), AbortAndRewind),
    (Api.InitProducerId, (CONCURRENT, CONCURRENT), PUBLISHED),
    (Api.InitProducerId, (OF_NO_KNOWN_KIND,), PUBLISHED),
    (Api.InitProducerId, (ID_DENIED,), ExitProcess),
]


def row_id(row: Row) -> str:
    api, errors, _ = row
    return "-".join([api.name, *map(str, errors)])


def some_member() -> GroupMetadata:
    """In the client's own form. The cluster does not check it, nor do these tests."""
    handle = b"CGMDv2:" + struct.pack("=i", 1) + b"g\0member\0\x01"
    return GroupMetadata("g", 1, "member", handle)


@contextmanager
def running_cluster() -> Iterator[MockCluster]:
    with MockCluster() as cluster:
        cluster.topic(IN)
        cluster.topic(OUT)
        yield cluster


@pytest.fixture
def cluster() -> Iterator[MockCluster]:
    with running_cluster() as cluster:
        yield cluster


@pytest.fixture(scope="module")
def shared() -> Iterator[MockCluster]:
    with running_cluster() as cluster:
        yield cluster


@pytest.fixture
def erring(shared: MockCluster) -> Iterator[MockCluster]:
    """For tests that do no more than fail requests of their own client."""
    yield shared
    shared.forget()


@contextmanager
def transactions(
    cluster: MockCluster, kind: type[KafkaSink] = KafkaSink, **changes: Any
) -> Iterator[Transactions]:
    with closing(Transactions(kind(settings(cluster, **changes)), some_member)) as opened:
        yield opened


@contextmanager
def ends_within(limit_s: float) -> Iterator[None]:
    begun = time.monotonic()
    yield
    assert time.monotonic() - begun < limit_s


def start_and_publish(through: Transactions) -> None:
    through.start()
    through.publish(OUTPUT, OFFSETS)


def expect(outcome: type[BrokerError], call: Callable[[], None]) -> None:
    with pytest.raises(outcome) as caught:
        call()
    assert caught.type is outcome, caught.value


def go_on(through: Transactions, outcome: type[BrokerError] | None) -> None:
    """As the worker does after that outcome: then a transaction is published."""
    if outcome is not None and issubclass(outcome, RebuildProducer):
        assert through.state is State.LOST
        through.rebuild()
    assert through.state is State.READY
    through.publish(OUTPUT, OFFSETS)
    assert through.state is State.READY


@pytest.mark.parametrize("row", ROWS, ids=row_id)
def test_an_error_leads_to_its_outcome(erring: MockCluster, row: Row) -> None:
    api, errors, outcome = row
    erring.fail(api, *errors)
    with transactions(erring) as through:
        if outcome is PUBLISHED:
            start_and_publish(through)
        else:
            expect(outcome, lambda: start_and_publish(through))
        if outcome is ExitProcess:
            assert through.state is State.LOST
        else:
            go_on(through, outcome)


@pytest.mark.parametrize(
    ("error", "outcome"),
    [(TOO_LARGE, ShrinkOutput), (FENCED, RebuildProducer), (OF_NO_KNOWN_KIND, AbortAndRewind)],
    ids=["too-large", "fenced", "of-no-known-kind"],
)
def test_a_record_refused_while_the_offsets_wait(
    erring: MockCluster, error: int, outcome: type[BrokerError]
) -> None:
    """The client then says of the offsets that their transaction is in a wrong state, and hides
    why. To abort on that would repeat for ever what only a rebuild or a smaller record mends."""
    erring.fail(Api.TxnOffsetCommit, LOADING)  # asked again half a second later
    erring.fail(Api.Produce, error)
    with transactions(erring) as through:
        expect(outcome, lambda: start_and_publish(through))


def test_a_record_that_the_client_does_not_take(erring: MockCluster) -> None:
    with transactions(erring) as through:
        through.start()
        huge = OutputRecord(OUT, b"key", bytes(2 * DEFAULT_MAX_BYTES), ())
        expect(ShrinkOutput, lambda: through.publish([*OUTPUT, huge], OFFSETS))
        go_on(through, ShrinkOutput)


class FailingCommit(KafkaSink):
    """Its brokers go away before a commit, as long as `cluster` is set."""

    cluster: MockCluster | None = None

    def commit(self, timeout_s: float) -> None:
        if FailingCommit.cluster is not None:
            FailingCommit.cluster.down()
        super().commit(timeout_s)


@pytest.mark.parametrize("before", ["begin", "commit"])
def test_a9_no_call_outlives_its_budget(
    cluster: MockCluster, before: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The client waits for the whole time-out of a request, whatever time a call is given; by
    default that is the transaction's, here 30 s. Ours is the budget of a publication."""
    with transactions(cluster, FailingCommit, publish_timeout_ms=500) as through:
        start_and_publish(through)
        if before == "commit":
            monkeypatch.setattr(FailingCommit, "cluster", cluster)
        else:
            cluster.down()
        with ends_within(PATIENCE_S / 2):  # 1 s, what an abort may take, and a busy machine
            expect(RebuildProducer, lambda: through.publish(OUTPUT, OFFSETS, budget_s=0.5))
        monkeypatch.setattr(FailingCommit, "cluster", None)
        cluster.up()
        go_on(through, RebuildProducer)


def test_a_start_without_brokers_exits(cluster: MockCluster) -> None:
    cluster.down()
    with closing(Transactions(KafkaSink(settings(cluster)), some_member, budget_s=0.2)) as through:
        with ends_within(PATIENCE_S / 2):
            expect(ExitProcess, through.start)
        assert through.state is State.LOST


def publish_input(cluster: MockCluster, value: bytes) -> None:
    with transactions(cluster) as through:
        through.start()
        through.publish([OutputRecord(IN, b"key", value, ())], {(OUT, 0): 1})


def test_brokers_away_for_longer_than_a_session(cluster: MockCluster) -> None:
    with joining(cluster, IN) as member:
        first = member.join()
        cluster.down()
        member.poll_until(lambda: not member.source.assignment())
        with pytest.raises(AbortAndRewind):
            check_member(member.source.group_metadata())
        assert member.revocations > 0
        cluster.up()
        member.joined_after(first.generation)
        publish_input(cluster, b"after")
        member.poll_until(lambda: bool(member.values))
        assert member.values == [b"after"]


@pytest.mark.parametrize("error", [GENERATION, MEMBER], ids=["generation", "member"])
def test_an_expelled_member_joins_again(erring: MockCluster, error: int) -> None:
    with joining(erring, IN) as member:
        first = member.join()
        erring.fail(Api.Heartbeat, error)
        member.joined_after(first.generation)
        assert member.revocations > 0


def test_a_fenced_static_member_exits(erring: MockCluster) -> None:
    with joining(erring, IN, static_membership=True) as member:
        member.join()
        erring.fail(Api.Heartbeat, INSTANCE)
        with pytest.raises(ExitProcess, match="fenced"):
            member.poll_until(lambda: member.revocations > 0)


def test_a_member_that_did_not_poll_publishes_nothing(erring: MockCluster) -> None:
    """The client drops the member id at once and keeps the generation (measured), before it
    says anything: the partitions still look like ours."""
    changes = {"publish_timeout_ms": 200, "max_poll_interval_ms": 1101}
    with joining(erring, IN, **changes) as member, closing(KafkaSink(settings(erring))) as sink:
        through = Transactions(sink, member.source.group_metadata)
        through.start()
        first = member.join()
        deadline = time.monotonic() + PATIENCE_S
        while member.source.group_metadata().member:
            assert time.monotonic() < deadline
            time.sleep(0.02)
        assert member.source.group_metadata().generation == first.generation
        assert member.source.assignment()
        expect(AbortAndRewind, lambda: through.publish(OUTPUT, OFFSETS))
        assert through.state is State.READY
        member.joined_after(first.generation)
        through.publish(OUTPUT, OFFSETS)
