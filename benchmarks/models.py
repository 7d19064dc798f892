"""Models that several benchmarks use."""

from __future__ import annotations

from pathlib import Path


def endless_model(folder: Path) -> Path:
    """The quick start's architecture with random weights, and nothing that would end a response."""
    import torch  # here: a benchmark that only starts services needs neither
    from transformers import Qwen2Config, Qwen2ForCausalLM

    from learner.tiny_model import TinySettings
    from learner.warmup import character_tokenizer

    shape, tokenizer = TinySettings(), character_tokenizer()
    tokenizer.eos_token = None
    config = Qwen2Config(
        vocab_size=len(tokenizer),
        hidden_size=shape.hidden_size,
        intermediate_size=shape.mlp_size,
        num_hidden_layers=shape.num_layers,
        num_attention_heads=shape.num_heads,
        num_key_value_heads=shape.num_kv_heads,
        max_position_embeddings=shape.max_position_embeddings,
        tie_word_embeddings=True,
        initializer_range=0.2,  # wide, so that a token's log-probs span several nats
        bos_token_id=None,
        eos_token_id=None,
    )
    torch.manual_seed(0)
    Qwen2ForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder
