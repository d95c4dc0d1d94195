"""Loading: where weights come from, what is refused, which dtype, and what the fingerprints see."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from processor.engine import dtype as dtypes
from processor.engine.dtype import choose_dtype
from processor.engine.model import LoadedModel, fingerprint_folder, load_model
from processor.errors import ConfigError
from tests.engine.tiny import save_tiny_model, tiny_config, tiny_model

CPU = torch.device("cpu")


def load(source: Path | str, tmp_path: Path, **changes: Any) -> LoadedModel:
    return load_model(str(source), cache_dir=tmp_path / "cache", **{"dtype": "float32"} | changes)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return save_tiny_model(tmp_path / "tiny")


def test_a_local_folder(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dtypes, "product_flops", lambda dtype, device: 1e9)
    model = load(folder, tmp_path)
    assert model.name == "tiny"  # no path of the machine in a decision
    assert model.model.dtype == torch.float32
    assert model.window == 1024
    again = load(folder, tmp_path)
    assert (again.fingerprint, again.numerics) == (model.fingerprint, model.numerics)
    assert load(folder, tmp_path, dtype="bfloat16").numerics != model.numerics


def test_fingerprint_sees_weights_tokenizer_and_configuration(folder: Path) -> None:
    seen = {fingerprint_folder(folder)}
    for name in ("model.safetensors", "tokenizer.json", "config.json"):
        with (folder / name).open("ab") as stream:
            stream.write(b" ")
        seen.add(fingerprint_folder(folder))
    (folder / "notes.md").write_text("not part of the model")
    seen.add(fingerprint_folder(folder))
    assert len(seen) == 4


@pytest.mark.parametrize(
    ("config", "remedy"),
    [
        (tiny_config("llama").to_dict() | {"model_type": "mamba"}, "'mamba' is not supported"),
        (
            tiny_config("llama").to_dict()
            | {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}},
            "'dynamic'",
        ),
    ],
)
def test_what_cannot_be_served_is_refused(
    config: dict[str, Any], remedy: str, folder: Path, tmp_path: Path
) -> None:
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError, match=rf"model\.source.*{remedy}"):
        load(folder, tmp_path)


def test_a_checkpoint_that_lacks_weights_is_refused(tmp_path: Path) -> None:
    """transformers would fill them with random numbers, other ones at each start."""
    folder = save_tiny_model(tmp_path / "tiny", tie_word_embeddings=False)
    weights = load_file(folder / "model.safetensors")
    del weights["lm_head.weight"]
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ConfigError, match=r"model\.source.*lm_head\.weight"):
        load(folder, tmp_path)


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "model.safetensors"])
@pytest.mark.parametrize("content", [None, b"", b"garbage"])
def test_a_broken_folder_is_one_line(
    name: str, content: bytes | None, folder: Path, tmp_path: Path
) -> None:
    (folder / name).unlink()
    if content is not None:
        (folder / name).write_bytes(content)
    with pytest.raises(ConfigError, match=r"^settings: model\.source = [^\n]*$"):
        load(folder, tmp_path)


def test_a_broken_gguf_file_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "model.gguf").write_bytes(b"GGUF garbage")
    with pytest.raises(ConfigError, match=r"model\.source.*cannot be loaded"):
        load(tmp_path / "model.gguf", tmp_path)
    assert not list((tmp_path / "cache" / "models").iterdir())


def test_pickled_weights_are_not_looked_at(folder: Path, tmp_path: Path) -> None:
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(ConfigError, match="no \\*\\.safetensors"):
        load(folder, tmp_path)


@pytest.mark.parametrize(
    ("source", "remedy"), [("no/such/file.gguf", "no such file"), ("no-such-model", "the hub says")]
)
def test_a_source_that_is_not_there(
    source: str, remedy: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    with pytest.raises(ConfigError, match=rf"model\.source.*{remedy}"):
        load(source, tmp_path)


def test_auto_takes_the_fastest_and_fp32_on_a_tie(monkeypatch: pytest.MonkeyPatch) -> None:
    speeds = {torch.float32: 100.0, torch.bfloat16: 105.0}
    monkeypatch.setattr(dtypes, "product_flops", lambda dtype, device: speeds[dtype] * 1e9)
    assert choose_dtype("auto", CPU)[0] == torch.float32
    speeds[torch.bfloat16] = 2700.0
    chosen, note = choose_dtype("auto", CPU)
    assert chosen == torch.bfloat16
    assert "2,700.0" in note
    assert "100.0" in note


def test_a_slow_explicit_choice_gets_a_warning_with_both_figures(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    speeds = {torch.float32: 130.0, torch.bfloat16: 1.0}
    monkeypatch.setattr(dtypes, "product_flops", lambda dtype, device: speeds[dtype] * 1e9)
    with pytest.warns(UserWarning, match=r"slow here.*130\.0.*1\.0"):
        assert choose_dtype("bfloat16", CPU)[0] == torch.bfloat16


def test_the_measurement_measures() -> None:
    threads = torch.get_num_threads()
    assert 1e8 < dtypes.product_flops(torch.float32, CPU) < 1e14
    assert torch.get_num_threads() == threads


def test_label_head_keeps_what_the_whole_head_does() -> None:
    """Soft cap, scale, bias: the rows of a few tokens against the model's own logits."""
    for kind in ("llama", "gemma2", "granite", "cohere", "phi"):
        model = tiny_model(kind, tie_word_embeddings=False)
        ids = torch.tensor([[5, 6, 7, 8]])
        with torch.inference_mode():
            model.model.set_attn_implementation("eager")
            hidden = model.body(input_ids=ids, use_cache=False).last_hidden_state[0]
            whole = model.model(input_ids=ids, use_cache=False).logits[0]
            rows = model.label_head([3, 99, 7])(hidden)
        assert torch.allclose(rows, whole[:, [3, 99, 7]].float(), atol=1e-4), kind
