"""Faults at random, for as long as one likes: `python -m tests.kafka.soak --seed N`.

Three brokers, three workers that keep being killed, frozen, stopped and fenced, brokers that are
killed and stopped too, an input with aborted transactions; and in the end `processor verify`. The
seed decides which fault comes when: the same seed repeats the plan, though no two runs of several
processes are the same.
"""

from __future__ import annotations

import argparse
import json
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from confluent_kafka import Producer

from processor.kafka_settings import KafkaSettings
from tests.core.builders import write_policy
from tests.kafka.cluster import Cluster
from tests.kafka.harness import KafkaHarness
from tests.kafka.soak_feed import Feed
from tests.kafka.soak_worker import CALLS
from tests.kafka.soak_workers import ROOT, Keeper, Life

PARTITIONS = 6
WORKERS = 3
PER_BURST = 4500  # events: two micro-batches of 750 for each worker
AT_WORK_S = 4.0  # how long a burst keeps the workers busy
DRAIN_S = 180.0
FAULTS = ("lost", "doubled", "reordered")
KINDS = ("kill", "failpoint", "freeze", "term", "hijack", "broker_kill", "broker_stop")
WEIGHTS = (30, 25, 12, 8, 10, 8, 7)


@dataclass(frozen=True, order=True)
class Fault:
    at: float  # seconds from the start
    kind: str
    target: int
    detail: tuple[Any, ...] = ()


def plan(seed: int, seconds: float, bursts: int) -> list[Fault]:
    """Every worker is killed three times at least; the rest is left to chance."""
    chance = random.Random(seed)
    every = seconds / bursts
    moments = [b * every + chance.uniform(0.1, AT_WORK_S) for b in range(bursts) for _ in range(2)]
    moments += [chance.uniform(0, seconds) for _ in range(bursts)]
    kills = [worker for worker in range(WORKERS) for _ in range(3)]
    while len(moments) < len(kills):
        moments.append(chance.uniform(0, seconds))
    chance.shuffle(moments)
    faults = [Fault(at, "kill", worker) for at, worker in zip(moments, kills, strict=False)]
    for at in moments[len(kills) :]:
        [kind] = chance.choices(KINDS, WEIGHTS)
        detail: tuple[Any, ...] = ()
        if kind == "failpoint":
            call = chance.choice(CALLS)
            skip = chance.randrange(1500) if call == "produce" else chance.randrange(3)
            detail = (call, skip, chance.random() < 0.5)
        elif kind in ("freeze", "broker_kill", "broker_stop"):
            detail = (round(chance.uniform(2, 14), 1),)
        faults.append(Fault(round(at, 2), kind, chance.randrange(WORKERS), detail))
    return sorted(faults)


class Soak:
    def __init__(self, cluster: Cluster, folder: Path, events: int, seconds: float) -> None:
        self.cluster, self.folder, self.seconds = cluster, folder, seconds
        harness = KafkaHarness(cluster.address)
        topics = {
            "input": harness.topic(PARTITIONS),
            "output": harness.topic(PARTITIONS),
            "dead_letter": harness.topic(2),
        }
        write_policy(folder / "policy", topics=topics)
        self.group, self.word = harness.group(), harness.word
        self.bursts = max(1, round(events / PER_BURST))
        every = seconds / self.bursts
        self.feed = Feed(cluster.address, topics["input"], PARTITIONS, events, self.bursts, every)
        self.keepers = [self._keeper(n) for n in range(WORKERS)]
        self.broken: list[tuple[float, float]] = []  # when a broker was away
        self.restarts: list[tuple[float, int]] = []  # of brokers, due

    def settings(self, replica: int) -> dict[str, Any]:
        return {
            "bootstrap_servers": self.cluster.address,
            "group": self.group,
            "replica": str(replica),
            "transactional_id_prefix": self.word,
            "session_timeout_ms": 10_000,
            "transaction_timeout_ms": 10_000,
            "publish_timeout_ms": 5000,
        }

    def run(self, faults: list[Fault]) -> None:
        self.feed.start()
        start = time.monotonic()
        for fault in faults:
            while (left := start + fault.at - time.monotonic()) > 0:
                time.sleep(min(left, 0.05))
                self._restart_brokers()
            self._inject(fault)
            print(f"{fault.at:7.1f} s: {fault.kind} {fault.target} {fault.detail}", file=sys.stderr)
        while not self.feed.ended or self.restarts:
            time.sleep(0.1)
            self._restart_brokers()
        self.cluster.mend()

    def verify(self) -> dict[str, Any]:
        """`processor verify` over what was acknowledged, once the group has come to the end; and
        over what the input topic holds, so that an outcome of an aborted record would be seen."""
        self.feed.write_manifest(self.folder / "manifest.jsonl")
        manifest = "--manifest", str(self.folder / "manifest.jsonl")
        deadline = time.monotonic() + DRAIN_S
        while not (found := self._verdict(*manifest))["committed"] and time.monotonic() < deadline:
            time.sleep(2)
        for keeper in self.keepers:
            keeper.stop()
        return found | {"by_topic": self._verdict()}

    def figures(self) -> dict[str, Any]:
        lives = [life for keeper in self.keepers for life in keeper.lives]
        times = sorted(t for life in lives if (t := self._recovery(life)) is not None)
        return {
            "kills": sum(keeper.kills for keeper in self.keepers),
            "aborts": sum(life.actions("abort") for life in lives),
            "rebuilds": sum(life.actions("rebuild") for life in lives),
            "fencings": sum(life.fencings() for life in lives),
            "recovery_s": {
                "p50": round(statistics.median(times), 2) if times else None,
                "max": round(times[-1], 2) if times else None,
                "count": len(times),
            },
            "kills_of_each": [keeper.kills for keeper in self.keepers],
            "statuses": dict(Counter(str(life.status) for life in lives)),
            "broker_outages": len(self.broken),
        }

    def close(self) -> None:
        for keeper in self.keepers:
            keeper.stop()

    def _keeper(self, number: int) -> Keeper:
        arguments = {
            "settings": KafkaSettings(**self.settings(number)).model_dump(mode="json"),
            "policy": str(self.folder / "policy"),
        }
        return Keeper(str(number), self.folder, arguments)

    def _inject(self, fault: Fault) -> None:
        keeper, node = self.keepers[fault.target], fault.target + 1
        match fault.kind:
            case "kill":
                keeper.send(signal.SIGKILL)
            case "failpoint":
                keeper.failpoint = list(fault.detail)
                keeper.send(signal.SIGTERM)
            case "freeze":
                keeper.freeze(*fault.detail)
            case "term":
                keeper.send(signal.SIGTERM)
            case "hijack":
                self._hijack(fault.target)
            case _ if not self.restarts:  # two of three brokers must stay
                end = self.cluster.kill if fault.kind == "broker_kill" else self.cluster.stop
                now = time.time()
                end(node)
                self.restarts.append((time.monotonic() + fault.detail[0], node))
                self.broken.append((now, now + fault.detail[0] + 15))

    def _hijack(self, number: int) -> None:
        settings = KafkaSettings(**self.settings(number))
        client = {"bootstrap.servers": self.cluster.address, "log_level": 2}
        twin = Producer(client | {"transactional.id": settings.transactional_id})
        try:
            twin.init_transactions(10)
        except Exception as error:  # the coordinator may be away just now
            print(f"hijack: {error}", file=sys.stderr)

    def _restart_brokers(self) -> None:
        while self.restarts and self.restarts[0][0] <= time.monotonic():
            _, node = self.restarts.pop(0)
            self.cluster.start(node)

    def _recovery(self, life: Life) -> float | None:
        """Of a restart after a kill, unless a broker was away meanwhile."""
        seconds = life.recovery_s() if life.after_kill else None
        if seconds is None or any(a < life.began + 30 and life.began < b for a, b in self.broken):
            return None
        return seconds

    def _verdict(self, *options: str) -> dict[str, Any]:
        file = self.folder / "settings.yaml"
        settings = {"policies": ["policy"], "kafka": self.settings(0)}
        file.write_text(yaml.safe_dump(settings))
        command = [sys.executable, "-m", "processor.cli", "verify", str(file), "--json"]
        done = subprocess.run([*command, *options], cwd=ROOT, capture_output=True, check=False)
        if not done.stdout:
            raise RuntimeError(done.stderr.decode()[-2000:])
        verdict: dict[str, Any] = json.loads(done.stdout)
        return verdict


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=None)
    parser.add_argument("--events", type=int, default=100_000)
    parser.add_argument("--seconds", type=float, default=1200.0)
    parser.add_argument("--keep", type=Path, help="folder for logs and manifest")
    chosen = parser.parse_args()
    seed = random.SystemRandom().randrange(10**6) if chosen.seed is None else chosen.seed
    print(f"seed {seed}", file=sys.stderr)
    result = soak(seed, chosen.events, chosen.seconds, chosen.keep)
    print(json.dumps(result, indent=2))
    sys.exit(not is_clean(result))


def is_clean(result: dict[str, Any]) -> bool:
    by_topic = result["by_topic"]
    faults = [found[key] for found in (result, by_topic) for key in FAULTS]
    return not any(faults) and result["committed"] and by_topic["input"] == result["input"]


def soak(seed: int, events: int, seconds: float, keep: Path | None = None) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as made, Cluster(3) as cluster:
        folder = keep or Path(made)
        folder.mkdir(parents=True, exist_ok=True)
        run = Soak(cluster, folder, events, seconds)
        try:
            run.run(plan(seed, seconds, run.bursts))
            found = run.verify() | {"seed": seed} | run.figures()
        finally:
            run.close()
        if run.feed.failures:
            raise RuntimeError(f"the input is not what was meant: {run.feed.failures[:3]}")
        return found


if __name__ == "__main__":
    main()
