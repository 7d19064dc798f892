"""Publications: what is in the file, when it appears, and what is said when it cannot."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from blake3 import blake3
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from common.errors import ResourceError
from common.weights import TensorSpec, WeightManifest
from learner.publisher import Publisher, canary_token_ids, special_token_ids
from learner.update import Learner
from tests.learner_kit import make_config, model_logprobs, save_model

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def read(manifest: WeightManifest, spec: TensorSpec) -> torch.Tensor:
    data = bytearray(Path(manifest.path).read_bytes())
    count = spec.size_bytes // DTYPES[spec.dtype].itemsize
    return torch.frombuffer(data, dtype=DTYPES[spec.dtype], count=count, offset=spec.offset).reshape(spec.shape)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("llama"))


@pytest.fixture
def learner(folder: Path) -> Learner:
    return Learner(make_config("grpo"), folder)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_file_holds_every_tensor_of_the_checkpoint_in_the_served_precision(
    tmp_path: Path, tied: bool, dtype: str
) -> None:
    model = save_model(tmp_path / "model", tied=tied)
    learner = Learner(make_config("grpo", f"model.dtype={dtype}"), model)
    manifest = Publisher(tmp_path, "run", node_id="node-1").publish(3, learner)

    assert (manifest.version, manifest.node_id) == (3, "node-1")
    assert manifest.path == str(tmp_path / "run-v3.bin")
    data = Path(manifest.path).read_bytes()
    assert manifest.size_bytes == len(data)
    assert manifest.digest == blake3(data).hexdigest()
    stored = load_file(model / "model.safetensors")
    assert {spec.name for spec in manifest.tensors} == stored.keys()
    assert ("lm_head.weight" in stored) is not tied
    end = 0
    for spec in manifest.tensors:
        assert spec.offset == end
        end += spec.size_bytes
        assert torch.equal(read(manifest, spec), stored[spec.name].to(DTYPES[dtype]))
    assert end == manifest.size_bytes


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_canary_is_what_a_model_of_the_published_weights_says(tmp_path: Path, folder: Path, dtype: str) -> None:
    learner = Learner(make_config("grpo", f"model.dtype={dtype}"), folder)
    with torch.no_grad():
        learner.policy.model.model.norm.weight.mul_(1.5)  # not the weights in the folder any more
    manifest = Publisher(tmp_path, "run").publish(1, learner)
    served: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=DTYPES[dtype])
    served.load_state_dict({spec.name: read(manifest, spec) for spec in manifest.tensors}, strict=False)
    expected = model_logprobs(served, manifest.canary.token_ids)[1:]
    assert manifest.canary.logprobs == pytest.approx(expected.tolist(), abs=1e-5)
    assert len(manifest.canary.token_ids) == 24


def test_the_newest_two_files_stay_until_the_end(tmp_path: Path, learner: Learner) -> None:
    publisher = Publisher(tmp_path, "run")
    for version in (1, 2, 2, 3):
        publisher.publish(version, learner)
    assert {path.name for path in tmp_path.iterdir()} == {"run-v2.bin", "run-v3.bin"}
    publisher.close()
    publisher.close()
    assert list(tmp_path.iterdir()) == []


def test_a_file_that_an_engine_has_open_keeps_its_contents(tmp_path: Path, learner: Learner) -> None:
    publisher = Publisher(tmp_path, "run")
    first = publisher.publish(1, learner)
    before = Path(first.path).read_bytes()
    with open(first.path, "rb") as engine:
        with torch.no_grad():
            learner.policy.model.model.norm.weight.add_(1.0)
        publisher.publish(1, learner)
        publisher.close()
        assert engine.read() == before


def test_another_runs_files_are_left_alone(tmp_path: Path, learner: Learner) -> None:
    other = tmp_path / "other-v1.bin"
    other.write_bytes(b"x")
    publisher = Publisher(tmp_path, "run")
    publisher.publish(1, learner)
    publisher.close()
    assert list(tmp_path.iterdir()) == [other]


def test_too_little_space_is_said_before_anything_is_written(
    tmp_path: Path, learner: Learner, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.statvfs(tmp_path)
    full = os.statvfs_result([*real[:3], real.f_bfree, 3, *real[5:]])
    monkeypatch.setattr("learner.publisher.os.statvfs", lambda path: full)
    needed = sum(parameter.nbytes for parameter in learner.policy.model.parameters())
    with pytest.raises(ResourceError) as caught:
        Publisher(tmp_path, "run").publish(1, learner)
    assert str(tmp_path) in str(caught.value)
    assert f"{needed:,}" in str(caught.value)
    assert f"{3 * real.f_frsize:,} bytes free" in str(caught.value)
    assert list(tmp_path.iterdir()) == []


def test_space_that_runs_out_while_writing_leaves_no_file(
    tmp_path: Path, learner: Learner, monkeypatch: pytest.MonkeyPatch
) -> None:
    def write_tensors(file: Any, *_: Any) -> None:
        file.write(b"half")
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("learner.publisher.write_tensors", write_tensors)
    with pytest.raises(ResourceError, match="bytes free, and a publication needs"):
        Publisher(tmp_path, "run").publish(1, learner)
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_does_not_exist_is_named(tmp_path: Path, learner: Learner) -> None:
    with pytest.raises(ResourceError, match=r"weights.folder = .*missing.* cannot be written to"):
        Publisher(tmp_path / "missing", "run").publish(1, learner)


def test_canary_tokens_are_fixed_ordinary_and_in_the_vocabulary() -> None:
    tokens = canary_token_ids(30, special={0, 1, 2, 29})
    assert tokens == canary_token_ids(30, special={0, 1, 2, 29})
    assert set(tokens) <= set(range(3, 29))
    assert len(set(tokens)) > 5
    assert set(canary_token_ids(2, special={0, 1})) <= {0, 1}


def test_the_canary_fits_into_a_short_context(tmp_path: Path, folder: Path) -> None:
    learner = Learner(make_config("grpo", "rollout.max_tokens=10", "rollout.max_prompt_tokens=4"), folder)
    canary = Publisher(tmp_path, "run").publish(0, learner).canary
    assert (len(canary.token_ids), len(canary.logprobs)) == (9, 8)


def test_what_a_killed_learner_of_the_same_run_published_stays_until_newer_files_are_out(
    tmp_path: Path, learner: Learner
) -> None:
    """F-26: an engine that has yet to load version 10 finds it while the new learner restores."""
    others = {"run-v7-v1.bin", "run-v7.bin.txt", "a-run-v7.bin", "run.bin"}
    for name in (*others, "run-v9.bin", "run-v10.bin", ".run-v11.bin.123"):
        (tmp_path / name).write_bytes(b"x")

    def ours() -> set[str]:
        return {path.name for path in tmp_path.iterdir()} - others

    publisher = Publisher(tmp_path, "run")
    assert ours() == {"run-v9.bin", "run-v10.bin"}
    publisher.publish(11, learner)
    assert ours() == {"run-v10.bin", "run-v11.bin"}
    publisher.publish(12, learner)
    assert ours() == {"run-v11.bin", "run-v12.bin"}
    publisher.close()
    assert {path.name for path in tmp_path.iterdir()} == others


def test_special_tokens_are_found_in_tokenizer_and_configuration(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"bos_token_id": null, "eos_token_id": [7, 8], "vocab_size": 100}')
    (tmp_path / "generation_config.json").write_text('{"pad_token_id": 9}')
    (tmp_path / "tokenizer.json").write_text('{"added_tokens": [{"id": 90, "special": true}]}')
    assert special_token_ids(tmp_path) == {7, 8, 9, 90}


def test_large_tensors_are_written_in_pieces(tmp_path: Path, learner: Learner, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = Publisher(tmp_path, "whole").publish(1, learner)
    monkeypatch.setattr("learner.publisher.PIECE_BYTES", 64)
    pieces = Publisher(tmp_path, "pieces").publish(1, learner)
    assert pieces.digest == whole.digest
    assert np.array_equal(np.fromfile(pieces.path, np.uint8), np.fromfile(whole.path, np.uint8))
