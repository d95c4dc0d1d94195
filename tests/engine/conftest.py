from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from processor.core.policy import Policy, load_policy
from tests.core.builders import write_policy

PREFIX = (
    "Approve the order unless a rule below says otherwise.\n\n"
    'Order: {"text":"hello world"}\nDecision: approve\n\n'
    'Order: {"text":"see you"}\nDecision: decline'
)
MakePolicy = Callable[..., Policy]


def text_policy(
    parent: Path,
    name: str = "orders",
    labels: Sequence[Any] = ("approve", "decline", "review"),
    style: str = "plain",
    prefix: str = PREFIX,
    lead: str = "Order: ",
) -> Path:
    """A policy folder whose events have one field, `text`."""
    return write_policy(
        parent / name,
        prefix_text=prefix,
        schema={
            "type": "object",
            "properties": {"text": {"type": "string"}},
            "required": ["text"],
            "additionalProperties": False,
        },
        name=name,
        prompt={"style": style, "lead": lead, "cue": "Decision:"},
        event={"fields": ["text"]},
        labels=list(labels),
        topics={"input": name, "output": f"{name}.out", "dead_letter": f"{name}.dlq"},
    )


@pytest.fixture
def make_policy(tmp_path: Path) -> MakePolicy:
    """A policy on disk, loaded: `make_policy(name, labels, style=..., prefix=...)`."""
    return lambda *args, **kwargs: load_policy(text_policy(tmp_path, *args, **kwargs))


@pytest.fixture(autouse=True, scope="package")
def one_thread() -> Iterator[None]:
    """Tiny products gain nothing from more threads, and on busy cores they wait for each other."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
