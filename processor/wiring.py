"""Putting the parts together: from settings to a pipeline that is ready to score."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from processor import console
from processor.config import ModelSettings, Settings, load_settings
from processor.core.batch import Budget
from processor.core.pipeline import Pipeline, by_input_topic
from processor.core.policy import Policy
from processor.errors import ConfigError

if TYPE_CHECKING:  # torch takes seconds to import, and half of the commands do without
    from processor.engine.scorer import PrefixScorer
    from processor.engine.tokenizer import SuffixTokenizer

_LOAD_STEPS = 5  # stages that load_model reports


def read_settings(file: Path | None, model: str | None = None) -> Settings:
    """Settings from file and environment; `model` overrides the source. Raises `ConfigError`."""
    settings = load_settings(file, os.environ)
    if model is None:
        return settings
    return settings.model_copy(
        update={"model": settings.model.model_copy(update={"source": model})}
    )


def load_engine(
    model: ModelSettings, policies: Sequence[Policy]
) -> tuple[SuffixTokenizer, PrefixScorer, str]:
    """Load the model and freeze the prefixes, with a progress bar; and why that dtype."""
    by_input_topic(policies)  # refuses twins before anything is loaded
    with console.progress(_LOAD_STEPS + 1 + len(policies)) as step:
        step("importing torch")
        from processor.engine.model import load_model
        from processor.engine.scorer import PrefixScorer
        from processor.engine.tokenizer import SuffixTokenizer

        loaded = load_model(
            model.source,
            dtype=model.dtype,
            device=model.device,
            cache_dir=model.cache_dir,
            threads=model.threads,
            revision=model.revision,
            progress=step,
        )
        tokenizer = SuffixTokenizer(loaded, policies)
        return (
            tokenizer,
            PrefixScorer(loaded, tokenizer.policies.values(), step),
            loaded.dtype_note,
        )


def load_pipeline(settings: Settings, policies: Sequence[Policy]) -> tuple[Pipeline, str]:
    """A pipeline over the real engine; and why that dtype."""
    tokenizer, scorer, note = load_engine(settings.model, policies)
    batch = settings.batch
    budget = Budget(max_rows=batch.max_rows, max_events=batch.max_events)
    return Pipeline(policies, tokenizer, scorer, budget), note


def policy_folders(parent: Path) -> list[Path]:
    folders = sorted(file.parent for file in parent.glob("*/policy.yaml"))
    if not folders:
        raise ConfigError("demo", "--policies", str(parent), "holds no policy folder")
    return folders
