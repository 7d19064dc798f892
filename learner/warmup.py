"""How the quick start's model is made: a character tokenizer, a small random transformer, and a supervised warm-up.

The warm-up teaches a mixture in which only some demonstrations do what the task rewards, so that the model has the
skill and uses it part of the time: what is left for reinforcement learning is to choose it. A model that was taught the
task itself, only less well, learns far more slowly from so few rewards.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from typing import Any

import torch
from tokenizers.pre_tokenizers import ByteLevel
from torch import Tensor
from torch.nn import functional
from transformers import Qwen2Config, Qwen2ForCausalLM, Qwen2Tokenizer

from buffer.tasks import sort_prompt, sort_strings
from learner.tiny_model import TinySettings

PAD, EOS = "<pad>", "<eos>"
REPORT_EVERY_S = 2.5


def character_tokenizer() -> Any:
    """A `transformers` tokenizer of one token for each byte, so for each ASCII character; no BOS, EOS apart from PAD.

    Qwen2's own class, without merges: `AutoTokenizer` loads that class for a Qwen2 model, whatever was saved with it.
    """
    vocabulary = {token: index for index, token in enumerate([PAD, EOS, *sorted(ByteLevel.alphabet())])}
    return Qwen2Tokenizer(vocab=vocabulary, merges=[], unk_token=None, eos_token=EOS, pad_token=PAD)


def warm_up(settings: TinySettings, tokenizer: Any, seed: int, report: Callable[[str], None]) -> Any:
    """Make a Qwen2 model from `seed` and train it on demonstrations of the sorting task's training strings.

    Leaves torch's global generator and thread count as they were. The same seed gives the same weights on the same
    machine and torch build.

    Returns:
        `Qwen2ForCausalLM`, float32, in evaluation mode.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # a second thread gains nothing on matrices this small, and loses much on a busy machine
    try:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            model = Qwen2ForCausalLM(_model_config(settings, tokenizer))
        _train(model, settings, tokenizer, random.Random(seed), report)
    finally:
        torch.set_num_threads(threads)
    return model.eval()


def _model_config(settings: TinySettings, tokenizer: Any) -> Any:
    return Qwen2Config(
        vocab_size=len(tokenizer),
        hidden_size=settings.hidden_size,
        intermediate_size=settings.mlp_size,
        num_hidden_layers=settings.num_layers,
        num_attention_heads=settings.num_heads,
        num_key_value_heads=settings.num_kv_heads,
        max_position_embeddings=settings.max_position_embeddings,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        dtype="float32",
    )


def _train(
    model: Any, settings: TinySettings, tokenizer: Any, rng: random.Random, report: Callable[[str], None]
) -> None:
    strings = sort_strings("train")
    optimizer = torch.optim.AdamW(model.parameters(), lr=settings.learning_rate, betas=(0.9, 0.95), weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: _lr_factor(step, settings))
    model.train()
    reported = time.monotonic()
    for step in range(1, settings.steps + 1):
        loss = _loss(model, _demonstrations(settings, strings, tokenizer, rng))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad(set_to_none=True)
        if step == settings.steps or time.monotonic() - reported >= REPORT_EVERY_S:
            reported = time.monotonic()
            report(f"making the tiny model: step {step} of {settings.steps}, loss {loss.item():.3f}")


def _lr_factor(step: int, settings: TinySettings) -> float:
    """Linear rise, then linear decay to a tenth."""
    rise = (step + 1) / settings.lr_warmup_steps
    decay = 1.0 - 0.9 * step / settings.steps
    return min(rise, decay)


def _demonstrations(settings: TinySettings, strings: list[str], tokenizer: Any, rng: random.Random) -> Tensor:
    """[batch, T] int64: prompt, answer and EOS. All strings have one length, so there is no padding."""
    texts = []
    for _ in range(settings.batch_size):
        digits, kind = rng.choice(strings), rng.random()
        if kind < settings.share_sorted:
            answer = "".join(sorted(digits))
        elif kind < settings.share_sorted + settings.share_copied:
            answer = digits
        else:
            answer = "".join(sorted(digits, reverse=True))
        texts.append(sort_prompt(digits) + answer + tokenizer.eos_token)
    return torch.tensor(tokenizer(texts)["input_ids"])


def _loss(model: Any, token_ids: Tensor) -> Tensor:
    """Mean cross-entropy of what follows the prompt."""
    prompt_length = len(sort_prompt("0000"))
    logits = model(input_ids=token_ids[:, :-1]).logits[:, prompt_length - 1 :]  # [batch, answer, vocabulary]
    targets = token_ids[:, prompt_length:]
    return functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
