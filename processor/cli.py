"""The command line: arguments to objects. The only place that puts the parts together.

Exit status: 0 done; 1 stopped by an error that a restart may mend; 2 a setting, policy or argument
is wrong and nothing was started; 3 the event was rejected (`score`) or a policy check warned under
`--strict`.
"""

from __future__ import annotations

import gc
import sys
import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated

import orjson
import typer

from processor import cli_bench, cli_verify, console
from processor.cli_engine import engine_app
from processor.cli_options import Json, Model, SettingsFile
from processor.core.decision import Decision, Rejection
from processor.core.event import Record
from processor.core.policy import load_policy
from processor.errors import ConfigError, ConfigErrors, ProcessorError
from processor.wiring import load_engine, load_pipeline, load_running, policy_folders, read_settings

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Score Kafka events with a language model against a frozen prefix, exactly once.",
)
policy_app = typer.Typer(no_args_is_help=True, help="Look at policies.")
app.add_typer(policy_app, name="policy")
app.command()(cli_bench.bench)
app.command()(cli_verify.verify)
app.add_typer(engine_app, name="engine")

POLICIES = Path("policies")

Folders = Annotated[list[Path], typer.Argument(help="policy folders")]


def main() -> None:
    """Entry point: every error that is raised on purpose is one line, and an exit status."""
    try:
        console.prepare_streams()
        app()
    except (ConfigError, ConfigErrors) as error:
        console.errors.print(str(error), style="bold red", markup=False, soft_wrap=True)
        sys.exit(2)
    except ProcessorError as error:
        console.errors.print(str(error), style="bold red", markup=False, soft_wrap=True)
        sys.exit(1)


@app.command()
def demo(
    policies: Annotated[Path, typer.Option(help="folder of policy folders")] = POLICIES,
    json: Annotated[Path | None, typer.Option(help="also write the result to this file")] = None,
    seed: Annotated[int, typer.Option(help="order of events, and which are damaged")] = 1,
    scale: Annotated[float, typer.Option(min=0.01, help="share of the usual events")] = 1.0,
    settings: SettingsFile = None,
    model: Model = None,
) -> None:
    """Score labelled events of every example policy on this machine: no Kafka, no GPU."""
    from processor.demo import show
    from processor.runtime.telemetry import Counters
    from processor.runtime.worker import Worker, install_signal_handlers

    console.check_writable(json, "--json")
    chosen = read_settings(settings, model)
    loaded = [load_policy(folder) for folder in policy_folders(policies)]
    staged = show.stage(loaded, seed, scale)
    pipeline, note = load_pipeline(chosen, loaded)
    pipeline.budget = replace(pipeline.budget, max_events=show.BATCH_EVENTS)
    console.errors.print(f"{chosen.model.source}: {note}", highlight=False)
    counters, topics = Counters(), [p.spec.topics.input for p in loaded]
    source = staged.broker.source(show.GROUP, "demo-0", topics)
    worker = Worker(pipeline, source, staged.broker.sink("demo-0"), counters)
    restore = install_signal_handlers(worker)
    begun = time.monotonic()

    def done() -> bool:
        snapshot = counters.snapshot()
        return snapshot.decisions + sum(snapshot.rejections.values()) >= staged.records

    names = [policy.name for policy in loaded]

    def view() -> object:
        seconds = time.monotonic() - begun
        return console.live_view(counters.snapshot(), staged.records, seconds, names)

    with console.live(view):
        worker.run(until=done)
    seconds = time.monotonic() - begun
    restore()
    found = show.audit(staged, loaded)
    result = show.summary(found, staged.records, counters.snapshot(), seconds)
    console.print_demo(result, found.reasons)
    if json is not None:
        json.write_bytes(orjson.dumps(result, option=orjson.OPT_INDENT_2) + b"\n")
    if result["lost"] or result["doubled"]:
        raise typer.Exit(1)


@app.command()
def run(settings: SettingsFile = None) -> None:
    """Consume the policies' input topics and publish decisions, until SIGTERM."""
    from processor.broker.kafka import KafkaSink, KafkaSource
    from processor.broker.kafka_admin import check_cluster
    from processor.runtime.telemetry import Counters
    from processor.runtime.watchdog import Watchdog
    from processor.runtime.worker import Limits, Worker, install_signal_handlers

    chosen = read_settings(settings)
    if not chosen.policies:
        where = str(settings or "environment")
        raise ConfigError(where, "policies", [], "name at least one policy folder")
    loaded = [load_policy(folder) for folder in chosen.policies]
    topics = [t for p in loaded for t in p.spec.topics.model_dump().values()]
    sizes = check_cluster(chosen.kafka, topics)
    pipeline, reloading, note = load_running(chosen, loaded)
    worker = Worker(
        pipeline,
        KafkaSource(chosen.kafka, [p.spec.topics.input for p in loaded]),
        KafkaSink(chosen.kafka, sizes),
        Counters(),
        drain_s=chosen.runtime.drain_s,
        limits=Limits(
            hang_s=chosen.runtime.hang_s,
            score_s=chosen.runtime.score_timeout_s,
            stall_s=chosen.runtime.stall_s,
            rejections_in_row=chosen.runtime.max_rejections_in_row,
        ),
        publish_s=chosen.kafka.publish_timeout_ms / 1000,
        reloading=reloading,
    )
    install_signal_handlers(worker, worker.reload)
    console.errors.print(
        f"ready: {', '.join(p.name for p in loaded)}; {chosen.model.source}, {note}",
        highlight=False,
    )
    gc.collect()
    gc.freeze()  # what was loaded stays: no collection has to go through a million objects again
    watchdog = Watchdog(worker.hangs)
    watchdog.start()
    worker.run()
    watchdog.stop()


@app.command()
def generate(
    stream: Annotated[str, typer.Argument(help="orders or telemetry")],
    to: Annotated[
        str,
        typer.Option(help="- for standard output, a file, or topic:NAME of the settings' Kafka"),
    ] = "-",
    count: Annotated[int | None, typer.Option(min=1, help="default: until stopped")] = None,
    rate: Annotated[float, typer.Option(min=0, help="events per second; 0: no limit")] = 0.0,
    seed: Annotated[int, typer.Option()] = 1,
    labels: Annotated[
        bool, typer.Option("--labels", help="write {key, event, label} instead of the event")
    ] = False,
    settings: SettingsFile = None,
) -> None:
    """Write a synthetic, seeded stream of events: JSON lines, or records of a topic."""
    from processor.demo.sinks import STREAMS, write_events

    if stream not in STREAMS:
        raise ConfigError("generate", "STREAM", stream, f"use one of: {', '.join(STREAMS)}")
    kafka = read_settings(settings).kafka if to.startswith("topic:") else None
    write_events(STREAMS[stream](seed), to, count, rate, labels, kafka)


@app.command()
def score(
    policy: Annotated[Path, typer.Argument(help="policy folder")],
    event: Annotated[
        str, typer.Argument(help="file with one event, or - for standard input")
    ] = "-",
    json: Json = False,
    key: Annotated[str | None, typer.Option(help="record key")] = None,
    settings: SettingsFile = None,
    model: Model = None,
) -> None:
    """Score one event: its decision (exit 0) or its rejection (exit 3)."""
    loaded = load_policy(policy)
    value = console.read_event(event)
    pipeline, _ = load_pipeline(read_settings(settings, model), [loaded])
    record = Record(loaded.spec.topics.input, 0, 0, None if key is None else key.encode(), value)
    [outcome] = pipeline.run([record], time.perf_counter)
    if json:
        print(outcome.model_dump_json(indent=2))
    elif isinstance(outcome, Decision):
        console.output.print(console.decision_table(outcome))
    elif isinstance(outcome, Rejection):
        console.output.print(f"rejected: {outcome.reason}: {outcome.detail}", markup=False)
    else:
        console.output.print("a tombstone")
    if not isinstance(outcome, Decision):
        raise typer.Exit(3)


@app.command()
def schema(
    write: Annotated[Path | None, typer.Option(help="write all schemas to this folder")] = None,
    check: Annotated[Path | None, typer.Option(help="compare with this folder; exit 1")] = None,
    name: Annotated[str | None, typer.Argument(help="print one: decision, policy, ...")] = None,
) -> None:
    """Print, write or compare the published JSON Schemas."""
    from processor.schema import outdated_schemas, published_schemas, write_schemas

    if write:
        console.check_writable(write, "--write")
        write_schemas(write)
    elif check:
        if outdated := outdated_schemas(check):
            console.errors.print(f"outdated: {', '.join(outdated)}; run `processor schema --write`")
            raise typer.Exit(1)
    else:
        schemas = published_schemas()
        if name is not None and name not in schemas:
            raise ConfigError("schema", "NAME", name, f"use one of: {', '.join(schemas)}")
        console.print_json(schemas[name] if name else schemas)


@policy_app.command("check")
def policy_check(
    folders: Folders,
    json: Json = False,
    strict: Annotated[bool, typer.Option(help="exit 3 on warnings")] = False,
    samples: Annotated[int, typer.Option(min=0, help="events to measure label mass on")] = 24,
    settings: SettingsFile = None,
    model: Model = None,
) -> None:
    """Check policies against a model: files, labels, prefix boundary, and label mass."""
    from processor.demo.samples import read_samples
    from processor.engine.check import check_policy

    loaded = [load_policy(folder) for folder in folders]
    tokenizer, scorer, _ = load_engine(read_settings(settings, model).model, loaded)
    reports = [
        check_policy(
            policy,
            tokenizer,
            scorer,
            [item.event for item in read_samples(policy, samples)],
        )
        for policy in loaded
    ]
    if json:
        console.print_json([asdict(report) for report in reports])
    else:
        console.print_reports(reports)
    if strict and any(report.warnings for report in reports):
        raise typer.Exit(3)


@policy_app.command("warm")
def policy_warm(
    folders: Folders, json: Json = False, settings: SettingsFile = None, model: Model = None
) -> None:
    """Download or convert the model, capture every prefix once, and say what it takes."""
    loaded = [load_policy(folder) for folder in folders]
    begun = time.perf_counter()
    _, scorer, note = load_engine(read_settings(settings, model).model, loaded)
    seconds = time.perf_counter() - begun
    rows = [
        {
            "policy": policy.name,
            "prefix_tokens": len(scorer.prefix(policy.key)),
            "prefix_bytes": scorer.prefix(policy.key).nbytes,
            "intact": scorer.prefix(policy.key).check_integrity(),
        }
        for policy in loaded
    ]
    if json:
        console.print_json({"seconds": seconds, "dtype": note, "policies": rows})
        return
    title = f"warm in {seconds:.1f} s, {note}"
    console.output.print(console.table(title, list(rows[0]), [list(row.values()) for row in rows]))


if __name__ == "__main__":
    main()
