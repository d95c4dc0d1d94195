"""The commands `engine ...`: questions about this chip that no policy changes."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from processor import console
from processor.cli_options import Json, Model, SettingsFile
from processor.core.policy import load_policy
from processor.wiring import load_engine, policy_folders, read_settings

engine_app = typer.Typer(no_args_is_help=True, help="Look at the engine on this chip.")


@engine_app.callback()
def _engine() -> None:
    """Keeps `self-check` a command of its own while it is the only one."""


@engine_app.command("self-check")
def self_check(
    folders: Annotated[list[Path] | None, typer.Argument(help="policies [default: all]")] = None,
    events: Annotated[int, typer.Option(min=1, help="scored in random batches")] = 1000,
    references: Annotated[int, typer.Option(min=0, help="compared with whole prompts")] = 8,
    length: Annotated[int, typer.Option(min=1, help="most tokens of an event")] = 200,
    batch: Annotated[int, typer.Option(min=2, help="most events of a batch")] = 32,
    seed: Annotated[int, typer.Option()] = 1,
    json: Json = False,
    settings: SettingsFile = None,
    model: Model = None,
) -> None:
    """Whether an event gets the same bits in any batch, and how far it is from whole prompts.

    Exit status 1 where any bit differs."""
    policies = [load_policy(folder) for folder in folders or policy_folders(Path("policies"))]
    _, scorer, note = load_engine(read_settings(settings, model).model, policies)
    from processor.engine.selfcheck import self_check

    found = self_check(
        scorer,
        [policy.key for policy in policies],
        events=events,
        references=references,
        max_length=length,
        max_events=batch,
        seed=seed,
    )
    if json:
        console.print_json(asdict(found))
    else:
        rows = [[key, str(value)] for key, value in asdict(found).items()]
        console.output.print(console.table(note, ["", "found"], rows))
    if found.differing:
        raise typer.Exit(1)
