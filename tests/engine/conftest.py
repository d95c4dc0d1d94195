from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from processor.core.policy import Policy, load_policy

PREFIX = (
    "Approve the order unless a rule below says otherwise.\n\n"
    'Order: {"text":"hello world"}\nDecision: approve\n\n'
    'Order: {"text":"see you"}\nDecision: decline'
)
MakePolicy = Callable[..., Policy]


@pytest.fixture
def make_policy(tmp_path: Path) -> MakePolicy:
    """A policy on disk, loaded: `make_policy(name, labels, style=..., prefix=...)`."""

    def make(
        name: str = "orders",
        labels: Sequence[Any] = ("approve", "decline", "review"),
        style: str = "plain",
        prefix: str = PREFIX,
        lead: str = "Order: ",
    ) -> Policy:
        folder = tmp_path / name
        folder.mkdir(exist_ok=True)
        (folder / "prefix.md").write_text(prefix)
        schema = {"type": "object", "properties": {"text": {"type": "string"}}}
        (folder / "schema.json").write_text(json.dumps(schema))
        spec = {
            "name": name,
            "version": "1",
            "prompt": {"style": style, "lead": lead, "cue": "Decision:"},
            "event": {"schema": "schema.json", "fields": ["text"]},
            "labels": list(labels),
            "topics": {"input": name, "output": f"{name}.out", "dead_letter": f"{name}.dlq"},
        }
        (folder / "policy.yaml").write_text(yaml.safe_dump(spec))
        return load_policy(folder)

    return make


@pytest.fixture(autouse=True, scope="package")
def one_thread() -> Iterator[None]:
    """Tiny products gain nothing from more threads, and on busy cores they wait for each other."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
