"""The value functions: what they read, what trains, where they start."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from common.errors import ModelError
from common.types import Trajectory
from learner.batching import MicroBatch, flatten, micro_batches
from learner.trunk import Compute, Trunk, load_model
from learner.value import PolicyHead, StateValues, ValueFunction, ValueModel, freeze_attention_of
from tests.learner_kit import save_model, trajectory

CPU = Compute(torch.device("cpu"), torch.float32)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("llama"))


def make(kind: str, folder: Path) -> ValueFunction:
    if kind == "own_model":
        return ValueModel(folder, CPU, freeze_attention=True)
    return PolicyHead(Trunk.of(load_model(folder, CPU), CPU), 32, seed=0)


def cut(trajectories: list[Trajectory], *, read_final_state: bool = True) -> list[MicroBatch]:
    return micro_batches(flatten(trajectories, read_final_state=read_final_state), budget=100, layout="rows")


def values_of(value: ValueFunction, trajectories: list[Trajectory], *, read_final_state: bool = True) -> StateValues:
    value.start(cut(trajectories, read_final_state=read_final_state))
    return value.values(0)


def shuffle_head(value: ValueFunction) -> None:
    """A head of random numbers, so that values differ from state to state."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in value.named_parameters():
            if "trunk" not in parameter[0]:
                parameter[1].normal_(generator=generator)


@pytest.mark.parametrize("kind", ["own_model", "policy_head"])
def test_first_values_are_zero(folder: Path, kind: str) -> None:
    before, final = values_of(make(kind, folder), [trajectory([5, 6, 7], [0, 1, 1])])
    assert before.tolist() == [0.0, 0.0]
    assert final.tolist() == [0.0]


@pytest.mark.parametrize("kind", ["own_model", "policy_head"])
def test_the_value_of_a_token_cannot_see_it(folder: Path, kind: str) -> None:
    """F-13: changing token t changes the values after it, and not its own."""
    value = make(kind, folder)
    shuffle_head(value)
    first = values_of(value, [trajectory([5, 6, 7, 8], [0, 1, 1, 1])])
    other = values_of(value, [trajectory([5, 6, 99, 8], [0, 1, 1, 1])])
    same = torch.isclose(first.before, other.before)
    assert same.tolist() == [True, True, False]
    assert not torch.isclose(first.final, other.final)


@pytest.mark.parametrize("kind", ["own_model", "policy_head"])
def test_the_final_value_is_that_before_a_token_that_would_follow(folder: Path, kind: str) -> None:
    value = make(kind, folder)
    shuffle_head(value)
    _, final = values_of(value, [trajectory([5, 6, 7], [0, 1, 1])])
    longer, _ = values_of(value, [trajectory([5, 6, 7, 99], [0, 1, 1, 1])])
    torch.testing.assert_close(final[0], longer[2])
    assert values_of(value, [trajectory([5, 6, 7], [0, 1, 1])], read_final_state=False).final.tolist() == []


def trained_names(value: ValueFunction) -> set[str]:
    return {name for name, parameter in value.named_parameters() if parameter.requires_grad}


def test_attention_and_embeddings_stay_frozen_while_the_rest_trains(folder: Path) -> None:
    trained = trained_names(ValueModel(folder, CPU, freeze_attention=True))
    everything = trained_names(ValueModel(folder, CPU, freeze_attention=False))
    frozen = everything - trained
    assert frozen == {name for name in everything if "self_attn" in name or "embed_tokens" in name}
    assert "trunk.layers.0.post_attention_layernorm.weight" in trained
    assert {"head.weight", "head.bias", "trunk.norm.weight", "trunk.layers.1.mlp.up_proj.weight"} <= trained


def test_an_attention_that_is_not_found_is_not_silently_trained() -> None:
    with pytest.raises(ModelError, match="no attention is found to freeze: set value.freeze_attention = false"):
        freeze_attention_of(nn.ModuleDict({"mlp": nn.Linear(2, 2), "post_attention_layernorm": nn.LayerNorm(2)}))


def test_a_head_reads_the_policys_states_once_for_a_batch(folder: Path) -> None:
    policy = load_model(folder, CPU)
    value = PolicyHead(Trunk.of(policy, CPU), 32, seed=0)
    calls: list[int] = []
    policy.model.register_forward_hook(lambda module, inputs, output: calls.append(1))
    value.start(cut([trajectory([5, 6, 7], [0, 1, 1])]))
    for _ in range(3):
        value.values(0).before.sum().backward()
    assert len(calls) == 1
    assert all(parameter.grad is None for parameter in policy.parameters())


def test_values_do_not_depend_on_who_shares_the_micro_batch(folder: Path) -> None:
    value = make("own_model", folder)
    shuffle_head(value)
    short, long = trajectory([5, 6, 7], [0, 1, 1]), trajectory(list(range(9)), [0] + [1] * 8)
    together = values_of(value, [short, long])
    micro = cut([short, long])[0]
    alone = values_of(value, [short])
    places = [micro.tokens.tolist().index(token) for token in range(2)]
    np.testing.assert_allclose(together.before.detach()[places], alone.before.detach(), atol=1e-5)
