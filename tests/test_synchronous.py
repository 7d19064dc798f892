"""F-07: with a staleness bound of 0, asynchronous training is synchronous training."""

from __future__ import annotations

import itertools
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from buffer.prompts import PromptSource
from buffer.sources import load_rows
from common.config import DataConfig, EvaluationConfig
from learner.tiny_model import TinySettings, prepare_tiny_model
from tests.run_kit import SMALL, Run, records, trained_rows

pytestmark = [pytest.mark.ray, pytest.mark.engine]

SEED, UPDATES, BATCH_SIZE, GROUP_SIZE, LEARNING_RATE = 3, 5, 16, 4, 3e-4


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Trained just enough that some answers are right."""
    return prepare_tiny_model(0, tmp_path_factory.mktemp("models"), print, TinySettings(steps=150))


def train(model_folder: Path, run_dir: Path, *words: str) -> list[list[dict[str, Any]]]:
    """Run, and return the rows of each batch by sample id."""
    overrides = (f"seed={SEED}", f"model.path={model_folder}", f"run_dir={run_dir}", f"max_updates={UPDATES}")
    status, output = Run("train", *SMALL, *overrides, "staleness.bound=0", "evaluation.num_prompts=0", *words).finish()
    assert status == 0, output
    rows = sorted(trained_rows(run_dir), key=lambda row: (row["batch_id"], row["sample_id"]))
    return [list(batch) for _, batch in itertools.groupby(rows, key=lambda row: row["batch_id"])]


def plain_loop(model_folder: Path, batches: list[list[dict[str, Any]]], checkpoint: Path) -> float:
    """Synchronous GRPO with the double-sided mask, written plainly; largest difference to the checkpoint's weights."""
    model = AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.0)
    for batch in batches:
        num_tokens = sum(sum(row["loss_mask"]) for row in batch)
        loss = torch.zeros(())
        for row in batch:
            rewards = torch.tensor([other["reward"] for other in batch if other["group_id"] == row["group_id"]])
            advantage = (row["reward"] - rewards.mean()) / (rewards.std() + 1e-6)
            ids = torch.tensor(row["token_ids"])
            logprobs = torch.log_softmax(model(ids[None]).logits[0, :-1], -1).gather(1, ids[1:, None])[:, 0]
            for index in (i for i, sampled in enumerate(row["loss_mask"]) if sampled):
                current = logprobs[index - 1]
                ratio = math.exp(current.item() - row["rollout_logprobs"][index])
                if 0.7 < ratio < 6.0:
                    loss = loss - ratio * advantage * current / num_tokens
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    saved = AutoModelForCausalLM.from_pretrained(checkpoint / "policy", dtype=torch.float32).state_dict()
    return max((saved[name] - weight).abs().max().item() for name, weight in model.state_dict().items())


def test_one_actor_equals_a_plain_synchronous_loop(model_folder: Path, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    batches = train(model_folder, run_dir, "recipe=grpo-dis", f"groups.size={GROUP_SIZE}")

    assert [len(batch) for batch in batches] == [BATCH_SIZE] * UPDATES
    data, evaluation = DataConfig(source="task:sort-digits"), EvaluationConfig(num_prompts=0)
    rows = load_rows(data, seed=SEED, split="train", evaluation=evaluation)
    prompts = PromptSource(rows, seed=SEED)
    tokenizer = AutoTokenizer.from_pretrained(model_folder)
    for batch in batches:
        wanted = [prompts.next() for _ in range(BATCH_SIZE // GROUP_SIZE)]
        assert [row["prompt_id"] for row in batch] == [p.prompt_id for p in wanted if p for _ in range(GROUP_SIZE)]
        answers = {p.prompt_id: p.answer for p in wanted if p}
        for row in batch:
            start = row["turns"][0]["start"]
            response = tokenizer.decode(row["token_ids"][start:], skip_special_tokens=True)
            assert row["reward"] == float(response == answers[row["prompt_id"]])
    assert len({row["reward"] for batch in batches for row in batch}) == 2  # else there was nothing to learn

    updates = records(run_dir, "update")
    assert [record["update"] for record in updates] == list(range(1, UPDATES + 1))
    assert [record["policy/learning_rate"] for record in updates] == [LEARNING_RATE] * UPDATES
    assert all(record["staleness/max"] == 0 and record["policy/rejected_tokens"] == 0 for record in updates)
    assert updates[-1]["buffer/dropped_stale"] == 0
    checkpoint = max((run_dir / "checkpoints").glob("update-*"))
    assert plain_loop(model_folder, batches, checkpoint) < 1e-5
    assert plain_loop(model_folder, batches[:-1], checkpoint) > 1e-5  # the comparison sees one update


def test_with_two_actors_no_token_of_any_batch_is_stale(model_folder: Path, tmp_path: Path) -> None:
    batches = train(model_folder, tmp_path / "run", "recipe=sao", "rollout.num_actors=2", "value.warmup_batches=0")
    versions = [{version for row in batch for version in row["weight_versions"]} - {-1} for batch in batches]
    assert versions == [{version} for version in range(UPDATES)]
