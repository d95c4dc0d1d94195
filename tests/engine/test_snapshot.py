"""Spans come back from disk with the same bits, or are captured anew: never wrong, never fatal."""

from __future__ import annotations

import dataclasses
import json
import os
import time
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open

from processor.engine import prefix as prefixes
from processor.engine import snapshot, tree
from processor.engine.model import LoadedModel
from processor.engine.plan import KEY_BLOCK
from processor.engine.prefix import FrozenPrefix
from processor.engine.snapshot import Snapshots
from processor.engine.tree import Owner, PrefixTree
from tests.engine.test_tree import OWNER, bits, cuts, small_model, tokens
from tests.engine.tiny import tiny_model

IDS = tokens(2 * KEY_BLOCK + 40)


@pytest.fixture
def captured(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The number of tokens of each capture, as the tree asks for them."""
    seen = []

    def counted(model: LoadedModel, base: Any, token_ids: Any) -> Any:
        seen.append(len(token_ids))
        return prefixes.capture_steps(model, base, token_ids)

    monkeypatch.setattr(tree, "capture_steps", counted)
    return seen


def boot(folder: Path, model: LoadedModel, ids: Any = IDS, owner: Owner = OWNER) -> FrozenPrefix:
    """What a new process does."""
    return PrefixTree(model, Snapshots(folder, model)).capture(ids, owner)


def files(folder: Path) -> list[Path]:
    return sorted(folder.iterdir())


def test_a_second_boot_maps_what_the_first_one_captured(
    tmp_path: Path, captured: list[int]
) -> None:
    model, folder = small_model(), tmp_path / "new" / "folder"
    first = boot(folder, model)
    [file] = files(folder)
    assert captured == [len(IDS)]
    second = boot(folder, model)
    assert captured == [len(IDS)]
    assert bits(second) == bits(first)
    assert second.check_integrity()
    assert file.name in Path("/proc/self/maps").read_text()
    for tensor in (*second.spans[0].keys, *second.spans[0].values):
        assert tensor.is_contiguous()
        assert tensor.data_ptr() % 64 == 0
    assert file.stat().st_mode & 0o077 == 0


def test_no_write_to_a_mapped_tensor_reaches_the_file(tmp_path: Path) -> None:
    model = small_model()
    boot(tmp_path, model)
    [file] = files(tmp_path)
    content = file.read_bytes()
    mapped = boot(tmp_path, model)
    mapped.spans[0].keys[0].add_(1)
    assert not mapped.check_integrity()
    assert file.read_bytes() == content
    assert boot(tmp_path, model).check_integrity()


def test_each_span_of_a_planned_tree_has_a_file(tmp_path: Path, captured: list[int]) -> None:
    model = small_model()
    other = IDS[:KEY_BLOCK] + tokens(30, seed=1)
    for _ in range(2):
        planned = PrefixTree(model, Snapshots(tmp_path, model))
        planned.plan([(IDS, OWNER), (other, OWNER)])
        kept = [planned.capture(ids, OWNER) for ids in (IDS, other)]
        assert kept[0].spans[0] is kept[1].spans[0]
    assert captured == [KEY_BLOCK, KEY_BLOCK + 40, 30]
    assert len(files(tmp_path)) == 3
    assert cuts(boot(tmp_path, model)) == [len(IDS)]  # cut elsewhere: another file


def flip(file: Path, place: int) -> None:
    content = bytearray(file.read_bytes())
    content[place] ^= 1
    file.write_bytes(content)


def header_edit(change: Callable[[dict[str, Any]], None]) -> Callable[[Path], None]:
    def damage(file: Path) -> None:
        content = file.read_bytes()
        size = int.from_bytes(content[:8], "little")
        header = json.loads(content[8 : 8 + size])
        change(header)
        text = json.dumps(header).encode()
        file.write_bytes(len(text).to_bytes(8, "little") + text + content[8 + size :])

    return damage


def reshape(header: dict[str, Any]) -> None:
    heads, count, size = header["keys.0000"]["shape"]
    header["keys.0000"]["shape"] = [heads, count, size // 2, 2]


def transpose(header: dict[str, Any]) -> None:
    header["keys.0000"]["shape"].reverse()


def retype(header: dict[str, Any]) -> None:
    header["values.0000"]["dtype"] = "I32"


def swap_layers(header: dict[str, Any]) -> None:
    keys, values = header["keys.0000"], header["values.0000"]
    keys["data_offsets"], values["data_offsets"] = values["data_offsets"], keys["data_offsets"]


def rename(header: dict[str, Any]) -> None:
    header["other"] = header.pop("keys.0000")


def other_tokens(header: dict[str, Any]) -> None:
    identity = json.loads(header["__metadata__"]["identity"])
    identity["tokens"][3] += 1
    header["__metadata__"]["identity"] = json.dumps(identity)


DAMAGES: dict[str, Callable[[Path], Any]] = {
    "first value": lambda f: flip(f, 8 + int.from_bytes(f.read_bytes()[:8], "little")),
    "last byte": lambda f: flip(f, -1),
    "length of the header": lambda f: flip(f, 7),
    "in the header": lambda f: flip(f, 9),
    "one byte short": lambda f: os.truncate(f, f.stat().st_size - 1),
    "half": lambda f: os.truncate(f, f.stat().st_size // 2),
    "empty": lambda f: os.truncate(f, 0),
    "longer": lambda f: f.write_bytes(f.read_bytes() + b"x"),
    "something else": lambda f: f.write_bytes(b"\x80\x04K\x01." * 99),
    "no metadata": header_edit(lambda header: header.pop("__metadata__")),
    "no checksum": header_edit(lambda header: header["__metadata__"].pop("checksum")),
    "wrong checksum": header_edit(lambda header: header["__metadata__"].update(checksum="0" * 64)),
    "no JSON": header_edit(lambda header: header["__metadata__"].update(identity="{")),
    "identity of another kind": header_edit(
        lambda header: header["__metadata__"].update(identity="3")
    ),
    "one other token": header_edit(other_tokens),
    "other rank": header_edit(reshape),
    "transposed": header_edit(transpose),
    "other dtype": header_edit(retype),
    "keys for values": header_edit(swap_layers),
    "renamed tensor": header_edit(rename),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_file_is_captured_anew_and_replaced(
    damage: str, tmp_path: Path, captured: list[int]
) -> None:
    model = small_model()
    good = boot(tmp_path, model)
    [file] = files(tmp_path)
    content = file.read_bytes()
    DAMAGES[damage](file)
    with pytest.warns(UserWarning, match=f"cannot read prefix snapshot .*{file.name}") as seen:
        found = boot(tmp_path, model)
    assert len(seen) == 1
    assert bits(found) == bits(good)
    assert captured == [len(IDS)] * 2
    assert [f.read_bytes() for f in files(tmp_path)] == [content]
    boot(tmp_path, model)
    assert captured == [len(IDS)] * 2


@pytest.mark.parametrize(
    "change", [lambda t: t[:, 1:].contiguous(), lambda t: t[:1].clone(), torch.Tensor.bfloat16]
)
def test_tensors_that_do_not_fit_the_model_are_not_used(
    change: Callable[[torch.Tensor], torch.Tensor], tmp_path: Path
) -> None:
    """Whatever a file says of itself, checksum included."""
    model = small_model()
    good = boot(tmp_path, model)
    [span] = good.spans
    keys, values = (tuple(map(change, part)) for part in (span.keys, span.values))
    checksum = prefixes.checksum(keys, values)
    forged = dataclasses.replace(span, keys=keys, values=values, checksum=checksum)
    Snapshots(tmp_path, model).save(forged, OWNER.scope)
    with pytest.warns(UserWarning, match="it holds tensors of"):
        assert bits(boot(tmp_path, model)) == bits(good)


def test_swapped_files_are_captured_anew_with_one_warning(
    tmp_path: Path, captured: list[int]
) -> None:
    model, other = small_model(), tokens(len(IDS), seed=1)
    kept = [boot(tmp_path, model, ids) for ids in (IDS, other)]
    one, two = files(tmp_path)
    one.rename(tmp_path / "third")
    two.rename(one)
    (tmp_path / "third").rename(two)
    again = PrefixTree(model, Snapshots(tmp_path, model))
    with pytest.warns(UserWarning, match="another span") as seen:
        found = [again.capture(ids, OWNER) for ids in (IDS, other)]
    assert len(seen) == 1
    assert [bits(p) for p in found] == [bits(p) for p in kept]
    assert len(captured) == 4


def test_prefixes_whose_digests_collide_are_told_apart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(snapshot, "digest", lambda identity: "same")
    model, other = small_model(), tokens(len(IDS), seed=1)
    first = boot(tmp_path, model)
    with pytest.warns(UserWarning, match="another span"):
        second = boot(tmp_path, model, other)
    assert bits(second) != bits(first)
    assert len(files(tmp_path)) == 1
    with pytest.warns(UserWarning, match="another span"):
        assert bits(boot(tmp_path, model)) == bits(first)


def changed(model: LoadedModel | None = None, **fields: str) -> LoadedModel:
    return dataclasses.replace(model or small_model(), **fields)  # type: ignore[arg-type]


def short_model() -> LoadedModel:
    """In bf16; its numerics fingerprint tells too, and is made not to."""
    model = tiny_model(dtype=torch.bfloat16, num_hidden_layers=1)
    return changed(model, numerics=small_model().numerics)


OTHERS: dict[str, Callable[[], tuple[LoadedModel, tuple[int, ...], Owner]]] = {
    "weights": lambda: (changed(fingerprint="1" * 64), IDS, OWNER),
    "numerics": lambda: (changed(numerics="1" * 64), IDS, OWNER),
    "dtype": lambda: (short_model(), IDS, OWNER),
    "tenant": lambda: (small_model(), IDS, Owner("a")),
    "pool": lambda: (small_model(), IDS, Owner(share=True)),
    "tokens": lambda: (small_model(), (*IDS[:-1], 7), OWNER),
    "length": lambda: (small_model(), IDS[:-1], OWNER),
}


@pytest.mark.parametrize("collide", [False, True])
@pytest.mark.parametrize("other", OTHERS)
def test_a_file_serves_its_own_identity_only(
    other: str,
    collide: bool,
    tmp_path: Path,
    captured: list[int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """By its name; and by what it says of itself, should names collide."""
    if collide:
        monkeypatch.setattr(snapshot, "digest", lambda identity: "same")
    boot(tmp_path, small_model())
    [file] = files(tmp_path)
    content = file.read_bytes()
    model, ids, owner = OTHERS[other]()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore" if collide else "error")
        boot(tmp_path, model, ids, owner)
        boot(tmp_path, model, ids, owner)  # its own file serves it
    assert captured == [len(IDS), len(ids)]
    assert collide or (len(files(tmp_path)) == 2 and file.read_bytes() == content)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_short_dtypes_come_back_bit_by_bit(dtype: torch.dtype, tmp_path: Path) -> None:
    model = tiny_model(dtype=dtype, num_hidden_layers=2)
    first = boot(tmp_path, model).spans[0]
    second = boot(tmp_path, model).spans[0]
    for one, two in zip((*first.keys, *first.values), (*second.keys, *second.values), strict=True):
        assert two.dtype == dtype
        assert torch.equal(one, two)
    with safe_open(files(tmp_path)[0], "pt") as content:
        assert sorted(content.keys()) == ["keys.0000", "keys.0001", "values.0000", "values.0001"]


def block_folder(folder: Path) -> None:
    for file in files(folder):
        file.unlink()
    folder.rmdir()
    folder.touch()


def block_file(folder: Path) -> None:
    [file] = files(folder)
    file.unlink()
    file.mkdir()


@pytest.mark.parametrize(
    ("block", "warned"), [(block_folder, ["write"]), (block_file, ["read", "write"])]
)
def test_a_folder_that_cannot_be_used_costs_a_warning(
    block: Callable[[Path], None], warned: list[str], tmp_path: Path
) -> None:
    model, folder = small_model(), tmp_path / "folder"
    expected = bits(boot(folder, model))
    block(folder)
    blocked = PrefixTree(model, Snapshots(folder, model))
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        for _ in range(2):
            assert bits(blocked.capture(IDS, OWNER)) == expected
    assert [str(w.message).split()[1] for w in seen] == warned


@pytest.mark.parametrize("call", ["fsync", "replace"])
def test_a_full_disk_costs_a_warning_and_leaves_nothing_behind(
    call: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, call, full)
    model = small_model()
    with pytest.warns(UserWarning, match="write .*No space left") as seen:
        assert boot(tmp_path, model).check_integrity()
    assert len(seen) == 1
    assert files(tmp_path) == []


def test_readers_and_writers_of_one_file_do_not_disturb_each_other(tmp_path: Path) -> None:
    """It is replaced while it is mapped, by several at once, and at last it is gone."""
    model = small_model()
    first = boot(tmp_path, model)
    mapped = boot(tmp_path, model)
    stores = [Snapshots(tmp_path, model) for _ in range(4)]  # a warning would be an error

    def work(store: Snapshots) -> None:
        for _ in range(5):
            store.save(first.spans[0], OWNER.scope)
            assert store.load(IDS, 0, OWNER.scope) is not None

    with ThreadPoolExecutor() as pool:
        list(pool.map(work, stores))
    [file] = files(tmp_path)
    assert bits(boot(tmp_path, model)) == bits(mapped) == bits(first)
    file.unlink()
    assert bits(mapped) == bits(first)


def test_what_is_long_unused_is_pruned(tmp_path: Path) -> None:
    model = small_model()
    boot(tmp_path, model)
    [used] = files(tmp_path)
    boot(tmp_path, model, tokens(9, seed=1))
    (tmp_path / f"{used.name}.abc").touch()  # of a process that was killed
    (tmp_path / "notes.txt").touch()
    for file in files(tmp_path):
        os.utime(file, (0, time.time() - 3 * 86400))
    boot(tmp_path, model)
    assert Snapshots(tmp_path, model).prune(days=2) == 2
    assert files(tmp_path) == [used, tmp_path / "notes.txt"]
    assert Snapshots(tmp_path / "none", model).prune(days=2) == 0
