"""The check of a publication, and of the machine, without vLLM."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import math
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from actors.engine import engine_environment, make_engine
from actors.publication import Checkpoint, check_contents, checked_file, read_checkpoint
from common.errors import ConfigError, ModelError, PublicationGoneError, ResourceError, WeightUpdateError
from common.weights import Canary, WeightManifest
from tests.engine_fixtures import settings_for, write_publication

EMBEDDING = torch.arange(12.0).reshape(4, 3)
HEAD = torch.arange(12.0, 24.0).reshape(4, 3)
NORM = torch.ones(3)
CANARY = Canary(token_ids=(0, 3, 1), logprobs=(-1.0, -2.0))


def model_folder(folder: Path, *, tied: bool) -> Path:
    tensors = {"model.embed_tokens.weight": EMBEDDING, "model.norm.weight": NORM}
    if not tied:
        tensors["lm_head.weight"] = HEAD
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps({"vocab_size": 4, "tie_word_embeddings": tied}))
    return folder


def publication(folder: Path, *, tied: bool, extra: dict[str, torch.Tensor] | None = None) -> WeightManifest:
    tensors = {"model.embed_tokens.weight": EMBEDDING, "model.norm.weight": NORM}
    if not tied:
        tensors["lm_head.weight"] = HEAD
    return write_publication(folder / "w.bin", (tensors | (extra or {})).items(), 5, CANARY)


def check(manifest: WeightManifest, checkpoint: Checkpoint) -> None:
    check_contents(manifest, checkpoint, "float32", 64)
    check_bytes(manifest, checkpoint)


def check_bytes(manifest: WeightManifest, checkpoint: Checkpoint) -> None:
    with checked_file(manifest, checkpoint):
        pass


def without(manifest: WeightManifest, name: str) -> WeightManifest:
    return dataclasses.replace(manifest, tensors=tuple(spec for spec in manifest.tensors if spec.name != name))


def changed(manifest: WeightManifest, name: str, /, **changes: Any) -> WeightManifest:
    return dataclasses.replace(
        manifest,
        tensors=tuple(dataclasses.replace(spec, **changes) if spec.name == name else spec for spec in manifest.tensors),
    )


def test_checkpoint_lists_names_and_shapes(tmp_path: Path) -> None:
    checkpoint = read_checkpoint(str(model_folder(tmp_path, tied=False)))
    assert checkpoint.shapes == {
        "model.embed_tokens.weight": (4, 3),
        "model.norm.weight": (3,),
        "lm_head.weight": (4, 3),
    }
    assert checkpoint.vocab_size == 4
    assert checkpoint.tied_embedding is None
    assert checkpoint.size_bytes("float32") == (12 + 3 + 12) * 4
    assert checkpoint.size_bytes("bfloat16") == (12 + 3 + 12) * 2


def test_checkpoint_of_several_files_is_one(tmp_path: Path) -> None:
    save_file({"a.weight": NORM}, tmp_path / "model-00001-of-00002.safetensors")
    save_file({"b.weight": HEAD, "x.rotary_emb.inv_freq": NORM}, tmp_path / "model-00002-of-00002.safetensors")
    (tmp_path / "config.json").write_text(json.dumps({"text_config": {"vocab_size": 9}}))
    checkpoint = read_checkpoint(str(tmp_path))
    assert checkpoint.shapes == {"a.weight": (3,), "b.weight": (4, 3)}
    assert checkpoint.vocab_size == 9


def test_redundant_head_of_a_tied_checkpoint_is_not_asked_for(tmp_path: Path) -> None:
    save_file({"model.embed_tokens.weight": EMBEDDING, "lm_head.weight": EMBEDDING.clone()}, tmp_path / "m.safetensors")
    (tmp_path / "config.json").write_text(json.dumps({"vocab_size": 4, "tie_word_embeddings": True}))
    checkpoint = read_checkpoint(str(tmp_path))
    assert checkpoint.tied_embedding == "model.embed_tokens.weight"
    assert set(checkpoint.shapes) == {"model.embed_tokens.weight"}


def test_unusable_model_folders_are_named(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"nowhere has no config\.json"):
        read_checkpoint(str(tmp_path / "nowhere"))
    (tmp_path / "config.json").write_text('{"vocab_size": 4}')
    with pytest.raises(ModelError, match="safetensors"):
        read_checkpoint(str(tmp_path))
    (tmp_path / "model.safetensors").write_bytes(b"\x05\x00\x00\x00\x00\x00\x00\x00{{{{{")
    with pytest.raises(ModelError, match="cannot be read"):
        read_checkpoint(str(tmp_path))


@pytest.mark.parametrize("tied", [True, False])
def test_whole_publication_passes(tmp_path: Path, tied: bool) -> None:
    check(publication(tmp_path, tied=tied), read_checkpoint(str(model_folder(tmp_path, tied=tied))))


def test_tied_head_may_come_along_but_must_equal_its_embedding(tmp_path: Path) -> None:
    """F-02."""
    checkpoint = read_checkpoint(str(model_folder(tmp_path, tied=True)))
    check(publication(tmp_path, tied=True, extra={"lm_head.weight": EMBEDDING}), checkpoint)
    with pytest.raises(WeightUpdateError, match=r"'lm_head\.weight' differs from 'model\.embed_tokens\.weight'"):
        check(publication(tmp_path, tied=True, extra={"lm_head.weight": HEAD}), checkpoint)


def test_gaps_between_tensors_are_allowed(tmp_path: Path) -> None:
    manifest = publication(tmp_path, tied=True)
    moved = changed(manifest, "model.norm.weight", offset=64)
    checkpoint = read_checkpoint(str(model_folder(tmp_path, tied=True)))
    check_contents(dataclasses.replace(moved, size_bytes=76), checkpoint, "float32", 64)


def test_malformed_contents_are_refused_by_name(tmp_path: Path) -> None:
    """F-02: a misspelt name; and whatever else would load in part."""
    checkpoint = read_checkpoint(str(model_folder(tmp_path, tied=False)))
    good = publication(tmp_path, tied=False)
    norm = "model.norm.weight"
    cases = [
        (without(good, norm), r"version 5: 'model\.norm\.weight' missing"),
        (changed(good, norm, name="model.norn.weight"), r"'model\.norn\.weight' not in .* did you mean 'model\.norm\."),
        (changed(good, norm, shape=(1, 3)), r"'model\.norm\.weight' has shape \(1, 3\), the model has \(3,\)"),
        (changed(good, norm, dtype="bfloat16"), r"'model\.norm\.weight' is bfloat16, the engine computes in float32"),
        (changed(good, norm, offset=0), r"'model\.norm\.weight' is misplaced at offset 0"),
        (changed(good, norm, offset=50), r"'model\.norm\.weight' is misplaced at offset 50"),
        (dataclasses.replace(good, size_bytes=20), r"tensors end at byte \d+ of 20"),
        (dataclasses.replace(good, tensors=good.tensors + good.tensors[:1]), "given more than once"),
        (
            write_publication(tmp_path / "x.bin", [("a.weight", NORM)], 5, CANARY),
            r"'a\.weight' not in the model",
        ),
    ]
    for manifest, message in cases:
        with pytest.raises(WeightUpdateError, match=message):
            check_contents(manifest, checkpoint, "float32", 64)


def test_many_missing_names_are_counted(tmp_path: Path) -> None:
    checkpoint = Checkpoint("m", {f"layer.{i}": (1,) for i in range(7)}, 4, None)
    empty = write_publication(tmp_path / "w.bin", [], 5, CANARY)
    with pytest.raises(WeightUpdateError, match=r"'layer\.0', 'layer\.1', 'layer\.2' and 4 more missing"):
        check_contents(empty, checkpoint, "float32", 64)


@pytest.mark.parametrize(
    ("canary", "message"),
    [
        (Canary(token_ids=(1,), logprobs=()), "canary of 1 tokens"),
        (Canary(token_ids=tuple([1] * 64), logprobs=tuple([-1.0] * 63)), "canary of 64 tokens"),
        (Canary(token_ids=(1, 2), logprobs=(-1.0, -1.0)), "2 log-probs"),
        (Canary(token_ids=(1, 4), logprobs=(-1.0,)), "outside the vocabulary"),
        (Canary(token_ids=(1, 2), logprobs=(math.nan,)), "not finite"),
    ],
    ids=["one token", "too long", "wrong count", "unknown token", "nan"],
)
def test_unusable_canary_is_refused(tmp_path: Path, canary: Canary, message: str) -> None:
    """F-09: log-probs that are not finite come from broken weights."""
    manifest = dataclasses.replace(publication(tmp_path, tied=True), canary=canary)
    with pytest.raises(WeightUpdateError, match=message):
        check_contents(manifest, read_checkpoint(str(model_folder(tmp_path, tied=True))), "float32", 64)


def test_damaged_files_are_refused(tmp_path: Path) -> None:
    checkpoint = read_checkpoint(str(model_folder(tmp_path, tied=True)))
    manifest = publication(tmp_path, tied=True)
    file = Path(manifest.path)
    whole = file.read_bytes()

    file.write_bytes(whole[:-1])
    with pytest.raises(WeightUpdateError, match="has 59 bytes of 60"):
        check_bytes(manifest, checkpoint)
    file.write_bytes(whole[:7] + bytes([whole[7] ^ 1]) + whole[8:])
    with pytest.raises(WeightUpdateError, match="digest"):
        check_bytes(manifest, checkpoint)
    file.write_bytes(b"")
    with pytest.raises(WeightUpdateError, match="has 0 bytes of 60"):
        check_bytes(manifest, checkpoint)
    file.unlink()
    with pytest.raises(PublicationGoneError, match=r"w\.bin is gone"):
        check_bytes(manifest, checkpoint)


def test_checked_bytes_stay_readable_when_the_file_is_replaced(tmp_path: Path) -> None:
    checkpoint = read_checkpoint(str(model_folder(tmp_path, tied=True)))
    manifest = publication(tmp_path, tied=True)
    whole = Path(manifest.path).read_bytes()
    with checked_file(manifest, checkpoint) as path:
        os.unlink(manifest.path)
        Path(manifest.path).write_bytes(b"something else")
        assert Path(path).read_bytes() == whole
    assert not Path(path).exists()


@pytest.mark.parametrize(
    ("overrides", "error", "message"),
    [
        ({"kv_cache_bytes": 2**50}, ResourceError, r"engine\.kv_cache_mib"),
        ({"weights_folder": "/no/such/folder"}, ResourceError, r"weights\.folder /no/such/folder"),
        ({"device": "cuda"}, ConfigError, r"engine\.device"),
        ({"transport": "nccl"}, ConfigError, r"weights\.transport = 'nccl' needs CUDA"),
        ({"transport": "ipc"}, ConfigError, r"weights\.transport = 'ipc' needs CUDA"),
        ({"dtype": "float8"}, ConfigError, "float8"),
    ],
    ids=["memory", "folder", "no gpu", "nccl", "ipc", "dtype"],
)
def test_start_refuses_what_the_machine_does_not_have(
    tmp_path: Path, overrides: dict[str, Any], error: type[Exception], message: str
) -> None:
    if overrides.get("device") == "cuda" and torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    engine = make_engine(settings_for(model_folder(tmp_path, tied=True), **overrides))
    with pytest.raises(error, match=message):
        asyncio.run(engine.start())


def test_start_without_a_model_names_the_folder(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="missing-model"):
        asyncio.run(make_engine(settings_for(tmp_path / "missing-model")).start())


def test_environment_depends_on_device_and_kind(tmp_path: Path) -> None:
    on_cpu = engine_environment(settings_for(tmp_path, kind="async", cpu_threads=3))
    assert on_cpu["OMP_NUM_THREADS"] == "3"
    assert on_cpu["VLLM_ENABLE_V1_MULTIPROCESSING"] == "0"
    assert on_cpu["TORCHDYNAMO_DISABLE"] == "1"
    assert "TORCHDYNAMO_DISABLE" not in engine_environment(settings_for(tmp_path, enforce_eager=False))
    on_gpu = engine_environment(settings_for(tmp_path, kind="async", device="cuda"))
    assert not {"OMP_NUM_THREADS", "VLLM_ENABLE_V1_MULTIPROCESSING", "TORCHDYNAMO_DISABLE"} & set(on_gpu)
    stepped = engine_environment(settings_for(tmp_path, kind="in_process", device="cuda"))
    assert stepped["VLLM_ENABLE_V1_MULTIPROCESSING"] == "0"
