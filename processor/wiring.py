"""Putting the parts together: from settings to a pipeline that is ready to score."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from processor import console
from processor.config import BatchSettings, ModelSettings, Settings, load_settings
from processor.core.batch import Budget
from processor.core.pipeline import Pipeline, by_input_topic
from processor.core.policy import Policy
from processor.errors import ConfigError
from processor.runtime.reload import Reloading

if TYPE_CHECKING:  # torch takes seconds to import, and half of the commands do without
    from processor.engine.model import LoadedModel
    from processor.engine.scorer import PrefixScorer
    from processor.engine.tokenizer import CompiledPolicy, SuffixTokenizer

LOAD_STEPS = 5  # stages that load_model reports
SNAPSHOT_DAYS = 30  # a prefix that nobody asked for in this time is removed from the disk


def read_settings(file: Path | None, model: str | None = None) -> Settings:
    """Settings from file and environment; `model` overrides the source. Raises `ConfigError`."""
    settings = load_settings(file, os.environ)
    if model is None:
        return settings
    return settings.model_copy(
        update={"model": settings.model.model_copy(update={"source": model})}
    )


def load_weights(model: ModelSettings, progress: Callable[[str], None]) -> LoadedModel:
    """The model by itself, loaded as the settings say."""
    from processor.engine.model import load_configured

    return load_configured(model, progress)


def load_engine(
    model: ModelSettings, policies: Sequence[Policy]
) -> tuple[SuffixTokenizer, PrefixScorer, str]:
    """Load the model, freeze the prefixes and check for equal bits, with a progress bar; and why
    that dtype and attention."""
    by_input_topic(policies)  # refuses twins before anything is loaded
    with console.progress(LOAD_STEPS + 2 + len(policies)) as step:
        step("importing torch")
        from processor.engine.scorer import PrefixScorer
        from processor.engine.selfcheck import settle
        from processor.engine.snapshot import Snapshots
        from processor.engine.tokenizer import SuffixTokenizer
        from processor.engine.tree import PrefixTree

        loaded = load_weights(model, step)
        tokenizer = SuffixTokenizer(loaded, policies)
        snapshots = Snapshots(model.cache_dir / "prefixes", loaded) if model.snapshots else None
        tree = PrefixTree(loaded, snapshots)
        scorer = PrefixScorer(loaded, tokenizer.policies.values(), step, tree)
        if snapshots:
            snapshots.prune(SNAPSHOT_DAYS)
        step("checking for equal bits")
        settle(scorer, [policy.key for policy in policies])
        attention = loaded.backend.name.partition("/")[0]
        return tokenizer, scorer, f"{loaded.dtype_note}, {attention} attention"


def load_pipeline(settings: Settings, policies: Sequence[Policy]) -> tuple[Pipeline, str]:
    """A pipeline over the real engine; and why that dtype."""
    tokenizer, scorer, note = load_engine(settings.model, policies)
    return Pipeline(policies, tokenizer, scorer, _budget(settings.batch)), note


def load_running(
    settings: Settings, policies: Sequence[Policy]
) -> tuple[Pipeline, Reloading[CompiledPolicy], str]:
    """As `load_pipeline`, with what it takes to change policies later."""
    tokenizer, scorer, note = load_engine(settings.model, policies)
    pipeline = Pipeline(policies, tokenizer, scorer, _budget(settings.batch))
    return pipeline, Reloading(tokenizer, scorer, settings.runtime.reload_s), note


def _budget(batch: BatchSettings) -> Budget:
    return Budget(max_rows=batch.max_rows, max_events=batch.max_events)


def policy_folders(parent: Path) -> list[Path]:
    folders = sorted(file.parent for file in parent.glob("*/policy.yaml"))
    if not folders:
        raise ConfigError("demo", "--policies", str(parent), "holds no policy folder")
    return folders
