"""The command `verify`: whether the topics hold what exactly-once promises."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Annotated

import orjson
import typer

from processor import console
from processor.cli_options import Json, SettingsFile
from processor.core.outcome_log import InputLog
from processor.core.pipeline import by_input_topic
from processor.core.policy import Policy, load_policy
from processor.core.verify import Given, Verdict
from processor.documents import read_text
from processor.errors import ConfigError
from processor.wiring import read_settings

FIGURES = ("input", "decided", "rejected", "lost", "doubled", "reordered")
MORE = ("tombstones", "waiting", "unknown")  # for people only


def verify(
    file: Annotated[
        Path | None, typer.Argument(metavar="SETTINGS", help="settings file, as --settings")
    ] = None,
    json: Json = False,
    policy: Annotated[
        list[str] | None, typer.Option(help="name of a policy; repeatable [default: all]")
    ] = None,
    manifest: Annotated[
        Path | None,
        typer.Option(
            help="what was sent, as JSON lines {topic, partition, offset}, instead of the input "
            "topics; `tombstone: true` for records without a value"
        ),
    ] = None,
    timeout: Annotated[
        float, typer.Option(min=0.1, help="seconds to wait for a transaction to end")
    ] = 60.0,
    settings: SettingsFile = None,
) -> None:
    """Check that each input record has one outcome, in order; the group may be at work.

    Exit status 1 where records are lost, doubled or reordered."""
    if file and settings:
        raise ConfigError("verify", "SETTINGS", str(file), "name one settings file")
    where = file or settings
    chosen = read_settings(where)
    loaded = [load_policy(folder) for folder in chosen.policies]
    by_input_topic(loaded)
    policies = _chosen(loaded, policy, str(where or "environment"))
    listed = _read_manifest(manifest, policies) if manifest else None
    from processor.broker.kafka_reader import KafkaReader, audit

    late, reported = chosen.kafka.first_start != "earliest", set[str]()
    verdicts: dict[str, Verdict] = {}
    with console.errors.status("connecting") as status:

        def show(topic: str, records: int) -> None:
            status.update(f"{topic}: {records:,} records read")

        with closing(KafkaReader(chosen.kafka, timeout, show)) as reader:
            for item in policies:
                spec = item.spec
                given = None if listed is None else listed[spec.topics.input]
                verdicts[item.name] = audit(reader, spec, given, late, reported)
                reported |= {spec.topics.output, spec.topics.dead_letter}
    _print(verdicts, json)
    if not all(verdict.clean for verdict in verdicts.values()):
        raise typer.Exit(1)


def _chosen(loaded: Sequence[Policy], names: Sequence[str] | None, where: str) -> list[Policy]:
    known = [policy.name for policy in loaded]
    for name in names or ():
        if name not in known:
            raise ConfigError("verify", "--policy", name, f"use one of: {', '.join(known)}")
    if not loaded:
        raise ConfigError(where, "policies", [], "name at least one policy folder")
    return [policy for policy in loaded if not names or policy.name in names]


def _read_manifest(file: Path, policies: Sequence[Policy]) -> dict[str, InputLog]:
    """The lines of the policies' input topics; those of other topics are passed over."""
    logs = {policy.spec.topics.input: InputLog() for policy in policies}
    skips = {p.spec.topics.input for p in policies if p.spec.event.tombstones == "skip"}
    for number, line in enumerate(read_text(file, "--manifest", str(file)).splitlines(), 1):
        if not line.strip():
            continue
        try:
            entry = orjson.loads(line)
            topic, partition, offset = entry["topic"], entry["partition"], entry["offset"]
            if not _is_place(partition, offset):
                raise ValueError
            if topic in logs:
                skipped = topic in skips and entry.get("tombstone") is True
                logs[topic].append(Given(partition, offset, skipped))
        except (ValueError, LookupError, TypeError):
            remedy = "not a JSON object {topic, partition, offset}"
            raise ConfigError(str(file), f"line {number}", line, remedy) from None
    return logs


def _is_place(*numbers: object) -> bool:
    return all(type(number) is int and 0 <= number < 2**63 for number in numbers)


def summary(verdicts: Mapping[str, Verdict]) -> dict[str, int | bool]:
    """Sums over the policies; `committed`: of all."""
    sums = {name: sum(getattr(v, name) for v in verdicts.values()) for name in FIGURES}
    return {**sums, "committed": all(v.committed for v in verdicts.values())}


def _print(verdicts: Mapping[str, Verdict], json: bool) -> None:
    for name, verdict in verdicts.items():
        for finding in verdict.findings:
            console.errors.print(
                f"{name}: {finding}", markup=False, highlight=False, soft_wrap=True
            )
        if verdict.unknown:
            console.errors.print(
                f"warning: {name}: {verdict.unknown:,} records have no outcome, but it may have "
                "been deleted from its topic, or the group did not start at the first record: "
                "nothing is known of them",
                style="yellow",
                markup=False,
                soft_wrap=True,
            )
    if json:
        console.print_json(summary(verdicts))
        return
    for name, verdict in verdicts.items():
        rows = [[figure, getattr(verdict, figure)] for figure in (*FIGURES, *MORE)]
        rows.append(["committed to the end", "yes" if verdict.committed else "no"])
        console.output.print(console.table(name, ("", "records"), rows))
