"""Off-policy corrections: detached weights that multiply a policy loss, and masks that reject tokens from it.

A rejected token leaves the numerator of the loss only; `policy_loss` takes weights as `correction`, masks as `keep`.
"""

from __future__ import annotations

from torch import Tensor


def fresh_tokens(weight_versions: Tensor, current_version: int, bound: int) -> Tensor:
    """[N] bool: staleness, the learner's version minus the token's, is at most `bound`.

    Args:
        weight_versions: [N] integers, version of the weights that sampled each token (-1 off the loss mask: not fresh).
        current_version: the learner's version at the moment of training.
        bound: weight versions, >= 0.
    """
    return current_version - weight_versions <= bound
