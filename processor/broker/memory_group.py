"""Consumer groups of the in-process broker: members, generations and who owns which partition."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field

from processor.broker.transaction import GroupMetadata, TopicPartition
from processor.errors import AbortAndRewind


@dataclass(slots=True)
class Member:
    id: str
    instance: str | None
    topics: frozenset[str]


@dataclass(slots=True)
class Group:
    """Rebalances are cooperative (KIP-429): a partition goes to its new owner only after the old
    one has given it up. Every join and leave starts a new generation, except that a static member
    takes the place of its predecessor, which is fenced (KIP-345)."""

    name: str
    generation: int = 0
    members: dict[str, Member] = field(default_factory=dict)
    owners: dict[TopicPartition, str] = field(default_factory=dict)
    targets: dict[TopicPartition, str] = field(default_factory=dict)
    committed: dict[TopicPartition, int] = field(default_factory=dict)
    fenced: set[str] = field(default_factory=set)

    def join(self, member: Member, partitions: Collection[TopicPartition]) -> None:
        predecessor = next(
            (m for m in self.members.values() if m.instance and m.instance == member.instance),
            None,
        )
        self.members[member.id] = member
        if predecessor is None or predecessor.topics != member.topics:
            self.rebalance(partitions)
        if predecessor is not None:
            self.fenced.add(predecessor.id)
            del self.members[predecessor.id]
            for table in (self.owners, self.targets):
                for partition, owner in table.items():
                    table[partition] = member.id if owner == predecessor.id else owner

    def leave(self, member_id: str, partitions: Collection[TopicPartition]) -> None:
        del self.members[member_id]
        self.owners = {p: owner for p, owner in self.owners.items() if owner != member_id}
        self.rebalance(partitions)

    def rebalance(self, partitions: Collection[TopicPartition]) -> None:
        """Share the partitions evenly; a member keeps what it has up to its share (sticky)."""
        self.generation += 1
        self.targets = {}
        counts = dict.fromkeys(self.members, 0)
        homeless: list[TopicPartition] = []
        share, rest = divmod(len(partitions), max(1, len(self.members)))
        for partition in sorted(partitions):
            owner = self.owners.get(partition, "")
            quota = share + (1 if rest and counts.get(owner, 0) == share else 0)
            if owner in counts and counts[owner] < quota:
                rest -= counts[owner] == share
                self._target(partition, owner, counts)
            else:
                homeless.append(partition)
        for partition in homeless:
            readers = [m.id for m in self.members.values() if partition[0] in m.topics]
            if readers:
                self._target(partition, min(readers, key=lambda r: counts[r]), counts)

    def _target(self, partition: TopicPartition, member_id: str, counts: dict[str, int]) -> None:
        self.targets[partition] = member_id
        counts[member_id] += 1

    def claim(self, member_id: str) -> frozenset[TopicPartition]:
        """What a member owns after it has taken what is meant for it and free."""
        for partition, target in self.targets.items():
            if target == member_id:
                self.owners.setdefault(partition, member_id)
        return frozenset(p for p, owner in self.owners.items() if owner == member_id)

    def surplus(self, member_id: str) -> frozenset[TopicPartition]:
        """What a member owns and must give up."""
        return frozenset(
            p
            for p, owner in self.owners.items()
            if owner == member_id and self.targets.get(p) != member_id
        )

    def check(self, metadata: GroupMetadata, lax: bool = False) -> None:
        """Raise `AbortAndRewind` where a transactional commit comes from no current member.

        `lax` is what Kafka's classic groups do: generation -1 with an empty member id is not
        checked, unless an instance id, the `handle` here, comes with it.
        """
        nobody = metadata.generation < 0 and not metadata.member and metadata.handle is None
        if lax and nobody:
            return
        if metadata.member in self.fenced:
            raise AbortAndRewind("FENCED_INSTANCE_ID: another process has this group.instance.id")
        if metadata.member not in self.members:
            raise AbortAndRewind("UNKNOWN_MEMBER_ID")
        if metadata.generation != self.generation:
            raise AbortAndRewind(
                f"ILLEGAL_GENERATION: {metadata.generation}, the group is at {self.generation}"
            )
