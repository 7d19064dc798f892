"""Log-probs by the learner's shortcuts against the model's own logits. F-08: temperature. F-12: padding."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import (
    AutoModelForCausalLM,
    BloomConfig,
    BloomForCausalLM,
    Gemma2Config,
    Gemma2ForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    GraniteConfig,
    GraniteForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from common.errors import ModelError
from learner.batching import Layout, flatten, micro_batches
from learner.policy import Policy, TokenScores
from learner.trunk import Compute, checkpoint_names
from tests.learner_kit import VOCAB_SIZE, model_logprobs, random_batch, save_model, trajectory

CPU = Compute(torch.device("cpu"), torch.float32)


def make_policy(folder: Path, **changes: Any) -> Policy:
    settings: dict[str, Any] = {
        "trainable_layers": None,
        "logprob_chunk_tokens": 1000,
        "layout": "rows",
        **changes,
    }
    return Policy(folder, CPU, **settings)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("llama"))


def all_logprobs(policy: Policy, trajectories: Any, *, budget: int = 1000, layout: Layout = "rows") -> torch.Tensor:
    """[N], through any number of micro-batches."""
    batch = flatten(trajectories, read_final_state=False)
    logprobs = torch.zeros(batch.num_tokens)
    for micro in micro_batches(batch, budget=budget, layout=layout):
        logprobs[micro.tokens] = policy.scores(micro, batch).logprobs.detach()
    return logprobs


@pytest.mark.parametrize("family", ["llama", "qwen2"])
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize(("budget", "layout"), [(1000, "rows"), (25, "rows"), (1, "rows"), (40, "packed")])
def test_logprobs_are_the_models_own_however_the_batch_is_cut(
    tmp_path: Path, family: str, tied: bool, budget: int, layout: Layout
) -> None:
    policy = make_policy(save_model(tmp_path, family=family, tied=tied), layout=layout)
    batch = random_batch(np.random.default_rng(0), policy.model, noise=0.0)
    expected = np.concatenate([model_logprobs(policy.model, t.token_ids, t.temperature)[t.loss_mask] for t in batch])
    np.testing.assert_allclose(all_logprobs(policy, batch, budget=budget, layout=layout), expected, atol=2e-5)


def test_logits_are_divided_by_the_temperature_they_were_sampled_with(folder: Path) -> None:
    """F-08, with its numbers: neither forgetting T nor dividing log-probs by it gives these."""
    policy = make_policy(folder)
    logits = torch.tensor([2.0, 1.0, 0.0, -1.0])
    policy.logits = lambda hidden: logits.expand(len(hidden), 4)  # type: ignore[method-assign]
    scores = policy.score_states(torch.zeros(4, 32), torch.arange(4), torch.full((4,), 0.6))
    assert scores.logprobs.tolist() == pytest.approx([-0.2081, -1.8747, -3.5414, -5.2081], abs=1e-4)


@pytest.mark.parametrize("chunk", [1, 3, 7])
def test_chunks_change_neither_values_nor_gradients(folder: Path, chunk: int) -> None:
    def run(size: int) -> tuple[TokenScores, torch.Tensor, torch.Tensor]:
        policy = make_policy(folder, logprob_chunk_tokens=size)
        hidden = torch.randn(7, 32, generator=torch.Generator().manual_seed(1), requires_grad=True)
        temperatures = torch.linspace(0.5, 1.5, 7)
        scores = policy.score_states(hidden, torch.arange(7), temperatures, with_entropies=True)
        assert scores.entropies is not None
        (scores.logprobs * torch.arange(7) + scores.entropies).sum().backward()
        assert hidden.grad is not None
        return scores, hidden.grad, policy.model.lm_head.weight.grad

    whole, pieces = run(7), run(chunk)
    torch.testing.assert_close(pieces[0].logprobs, whole[0].logprobs)
    torch.testing.assert_close(pieces[0].entropies, whole[0].entropies)
    torch.testing.assert_close(pieces[1], whole[1])
    torch.testing.assert_close(pieces[2], whole[2])


def test_no_more_rows_of_logits_exist_at_a_time_than_a_chunk_has(folder: Path) -> None:
    policy = make_policy(folder, logprob_chunk_tokens=4)
    sizes = []
    policy.model.lm_head.register_forward_hook(lambda module, inputs, output: sizes.append(output.shape[0]))
    hidden = torch.randn(10, 32, requires_grad=True)
    waiting = []  # shapes of what is kept for the backward pass

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        waiting.append(tensor.shape)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        loss = policy.score_states(hidden, torch.arange(10), None).logprobs.sum()
    assert sizes == [4, 4, 2]
    assert (10, VOCAB_SIZE) not in waiting
    assert all(shape[0] != 4 or shape[-1] != VOCAB_SIZE for shape in waiting if len(shape) == 2)
    loss.backward()
    assert sizes == [4, 4, 2, 2, 4, 4]  # each computed again


def test_entropy_is_that_of_the_tempered_distribution(folder: Path) -> None:
    policy = make_policy(folder)
    policy.logits = lambda hidden: torch.tensor([[1.0, 0.0]])  # type: ignore[method-assign]
    scores = policy.score_states(torch.zeros(1, 32), torch.tensor([0]), torch.tensor([0.5]), with_entropies=True)
    p = 1 / (1 + np.exp(-2.0))  # logits 2 and 0
    assert scores.entropies is not None
    assert scores.entropies.item() == pytest.approx(-p * np.log(p) - (1 - p) * np.log(1 - p), abs=1e-6)


GEMMA = Gemma2Config(
    vocab_size=VOCAB_SIZE,
    hidden_size=32,
    intermediate_size=64,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
    final_logit_softcapping=0.5,
    sliding_window=4,
    initializer_range=0.3,
)
GRANITE = GraniteConfig(
    vocab_size=VOCAB_SIZE,
    hidden_size=32,
    intermediate_size=64,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    logits_scaling=8.0,
    initializer_range=0.3,
)
MOE = Qwen3MoeConfig(
    vocab_size=VOCAB_SIZE,
    hidden_size=32,
    intermediate_size=64,
    moe_intermediate_size=16,
    num_experts=4,
    num_experts_per_tok=2,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
    initializer_range=0.3,
)
BLOOM = BloomConfig(vocab_size=VOCAB_SIZE, hidden_size=32, n_layer=2, n_head=4, initializer_range=0.3)
GPT2 = GPT2Config(vocab_size=VOCAB_SIZE, n_embd=32, n_layer=2, n_head=4, n_positions=64, initializer_range=0.3)


@pytest.mark.parametrize(
    "model",
    [
        lambda: Gemma2ForCausalLM(GEMMA),
        lambda: GraniteForCausalLM(GRANITE),
        lambda: GPT2LMHeadModel(GPT2),
        lambda: Qwen3MoeForCausalLM(MOE),
        lambda: BloomForCausalLM(BLOOM),
    ],
    ids=["softcap", "scaling", "dropout", "experts", "no position ids"],
)
def test_models_that_change_their_logits_or_have_dropout_agree_too(tmp_path: Path, model: Any) -> None:
    torch.manual_seed(0)
    model().save_pretrained(tmp_path)
    policy = make_policy(tmp_path)
    ids = [5, 6, 7, 8, 9, 250]
    expected = model_logprobs(policy.model, ids)[1:]
    made = all_logprobs(policy, [trajectory(ids, [0, 1, 1, 1, 1, 1])])
    np.testing.assert_allclose(made, expected, atol=2e-5)
    assert np.ptp(expected) > 0.05  # the comparison can fail


def test_a_head_that_is_not_understood_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    GPT2LMHeadModel(GPT2).save_pretrained(tmp_path)
    original = GPT2LMHeadModel.forward

    def forward(self: Any, **inputs: Any) -> Any:
        output = original(self, **inputs)
        output.logits = output.logits * 2
        return output

    monkeypatch.setattr(GPT2LMHeadModel, "forward", forward)
    with pytest.raises(ModelError, match="GPT2LMHeadModel: log-probs"):
        make_policy(tmp_path)


def test_packing_that_changes_logprobs_is_refused(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("transformers.masking_utils.find_packed_sequence_indices", lambda position_ids: None)
    with pytest.raises(ModelError, match='packed sequences differ .* set learner.layout = "rows"'):
        make_policy(folder, layout="packed")
    make_policy(folder, layout="rows")


def test_a_model_without_position_ids_cannot_be_packed(tmp_path: Path) -> None:
    BloomForCausalLM(BLOOM).save_pretrained(tmp_path)
    with pytest.raises(ModelError, match='BloomModel takes no position ids: set learner.layout = "rows"'):
        make_policy(tmp_path, layout="packed")


def test_only_the_last_layers_train(folder: Path) -> None:
    policy = make_policy(folder, trainable_layers=1)
    trained = {name for name, parameter in policy.model.named_parameters() if parameter.requires_grad}
    assert trained
    assert all(name.startswith("model.layers.1.") for name in trained)
    batch = flatten([trajectory([5, 6, 7], [0, 1, 1])], read_final_state=False)
    (micro,) = micro_batches(batch, budget=100, layout="rows")
    graphs = []
    policy.trunk.layers()[1].register_forward_pre_hook(lambda module, inputs: graphs.append(inputs[0].requires_grad))
    policy.scores(micro, batch).logprobs.sum().backward()
    assert graphs == [False]  # nothing below was recorded
    assert {name for name, parameter in policy.model.named_parameters() if parameter.grad is not None} == trained


def test_more_trainable_layers_than_there_are_is_refused(folder: Path) -> None:
    with pytest.raises(ModelError, match=r"learner.trainable_layers = 3, and the model has 2 layers"):
        make_policy(folder, trainable_layers=3)


@pytest.mark.parametrize("tied", [False, True])
def test_weights_go_out_under_the_names_of_the_checkpoint(tmp_path: Path, tied: bool) -> None:
    policy = make_policy(save_model(tmp_path, tied=tied))
    weights = policy.checkpoint_weights()
    assert set(weights) == checkpoint_names(tmp_path, policy.model)
    assert ("lm_head.weight" in weights) is not tied
    assert all(not tensor.requires_grad for tensor in weights.values())
    assert weights["model.norm.weight"].data_ptr() == policy.model.model.norm.weight.data_ptr()  # no copy


def test_fused_experts_go_out_as_the_checkpoint_has_them(tmp_path: Path) -> None:
    torch.manual_seed(0)
    Qwen3MoeForCausalLM(MOE).save_pretrained(tmp_path)
    policy = make_policy(tmp_path)
    weights = policy.checkpoint_weights()
    stored = load_file(tmp_path / "model.safetensors")
    assert "model.layers.1.mlp.experts.3.down_proj.weight" in weights
    assert weights.keys() == stored.keys()
    assert all(torch.equal(weights[name], stored[name]) for name in stored)


def test_served_logprobs_are_those_of_rounded_weights(folder: Path) -> None:
    policy = make_policy(folder)
    ids = [5, 250, 7, 8]
    exact = model_logprobs(policy.model, ids)[1:]
    assert policy.served_logprobs(ids, torch.float32) == pytest.approx(exact.tolist(), abs=1e-5)
    rounded = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    expected = model_logprobs(rounded, ids)[1:].tolist()
    assert policy.served_logprobs(ids, torch.bfloat16) == pytest.approx(expected, abs=1e-5)
    assert expected != pytest.approx(exact.tolist(), abs=1e-4)
    assert policy.model.model.norm.weight.dtype == torch.float32


def break_config(folder: Path) -> None:
    (folder / "config.json").unlink()


def break_weights(folder: Path) -> None:
    (folder / "model.safetensors").unlink()


def truncate_weights(folder: Path) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1000])


def name_unknown_architecture(folder: Path) -> None:
    (folder / "config.json").write_text(json.dumps({"model_type": "no-such-model"}))


def add_a_layer(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 3, "layer_types": None}))


@pytest.mark.parametrize(
    ("breakage", "message"),
    [
        (break_config, "has no config.json"),
        (break_weights, "no .*safetensors"),
        (truncate_weights, "cannot be loaded"),
        (name_unknown_architecture, "cannot be loaded"),
        (add_a_layer, "lacks 9 of the model's tensors"),
    ],
)
def test_a_folder_that_cannot_be_used_is_named(tmp_path: Path, breakage: Any, message: str) -> None:
    save_model(tmp_path)
    breakage(tmp_path)
    with pytest.raises(ModelError, match=message) as caught:
        make_policy(tmp_path)
    assert str(tmp_path) in str(caught.value)
