"""A check at start that the learner's shortcuts give the model's own log-probs."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from common.errors import ModelError
from common.types import FinishReason, GroupId, LeaseId, SampleId, Trajectory, Turn
from learner.batching import Layout, build, flatten

if TYPE_CHECKING:
    from learner.policy import Policy

LENGTHS = (12, 5, 9)
TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.3}  # nats; a wrong mask or head is off by far more


@torch.no_grad()
def verify(policy: Policy, layout: Layout) -> None:
    """Compare the log-probs of a few random sequences with those from the model's logits, each sequence alone.

    Raises:
        ModelError: the head, the padding or the packing gives other numbers.
    """
    rng = np.random.default_rng(0)
    sequences = [rng.integers(0, policy.vocab_size, length).astype(np.int32) for length in LENGTHS]
    device = policy.model.device
    expected = torch.cat([_model_logprobs(policy, torch.from_numpy(ids).to(device)) for ids in sequences])
    batch = flatten([_all_sampled(ids) for ids in sequences], read_final_state=False, device=device)
    tolerance = TOLERANCE[policy.trunk.compute.dtype]

    everything = range(len(LENGTHS))
    error = (policy.scores(build(batch, everything, "rows"), batch).logprobs - expected).abs().max()
    if not error <= tolerance:
        raise ModelError(
            f"{type(policy.model).__name__}: log-probs from hidden states and output head differ from the model's by "
            f"{float(error):.3g} nats, so it changes its logits, or looks at padding, in a way that is not supported"
        )
    if layout == "packed":
        error = (policy.scores(build(batch, everything, "packed"), batch).logprobs - expected).abs().max()
        if not error <= tolerance:
            raise ModelError(
                f"{type(policy.model).__name__}: log-probs of packed sequences differ from those of single ones by "
                f'{float(error):.3g} nats: set learner.layout = "rows"'
            )


def _model_logprobs(policy: Policy, ids: Tensor) -> Tensor:
    """[T - 1] float32, of ids[1:]."""
    with policy.trunk.precision():
        logits: Tensor = policy.model(input_ids=ids[None], use_cache=False).logits[0, :-1]
    return logits.float().log_softmax(-1).gather(-1, ids[1:, None].long()).squeeze(-1)


def _all_sampled(token_ids: np.ndarray[tuple[int], np.dtype[np.int32]]) -> Trajectory:
    """A trajectory whose prompt is its first token."""
    total = len(token_ids)
    mask = np.arange(total) > 0
    return Trajectory(
        sample_id=SampleId(0),
        lease_id=LeaseId(0),
        group_id=GroupId(0),
        prompt_id="probe",
        epoch=0,
        attempt=0,
        token_ids=token_ids,
        loss_mask=mask,
        rollout_logprobs=np.zeros(total, np.float32),
        weight_versions=np.where(mask, np.int32(0), np.int32(-1)),
        turns=(Turn(start=1, stop=total, finish_reason=FinishReason.STOP),),
        temperature=1.0,
        reward=0.0,
        finish_reason=FinishReason.STOP,
    )
