"""Options that several commands have."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

SettingsFile = Annotated[
    Path | None, typer.Option("--settings", "-s", help="settings file (YAML); see schemas/")
]
Json = Annotated[bool, typer.Option("--json", help="print JSON on standard output")]
Model = Annotated[
    str | None, typer.Option("--model", help="smollm2, a hub id, a folder or a .gguf file")
]
