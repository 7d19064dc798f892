"""AdamW by its formula, and undoing it."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from learner.optimizer import Optimizer


def make(weight_decay: float = 0.0) -> tuple[nn.Parameter, Optimizer]:
    parameter = nn.Parameter(torch.tensor([1.0, -2.0]))
    frozen = nn.Parameter(torch.ones(3), requires_grad=False)
    return parameter, Optimizer(
        [("moving", parameter), ("frozen", frozen)], betas=(0.9, 0.95), weight_decay=weight_decay
    )


def set_gradient(parameter: nn.Parameter, values: list[float]) -> None:
    parameter.grad = torch.tensor(values)


def test_the_first_step_moves_every_weight_by_the_step_size_after_decay() -> None:
    parameter, optimizer = make(weight_decay=0.5)
    set_gradient(parameter, [3.0, -4.0])
    assert optimizer.gradient_norm() == pytest.approx(5.0)
    optimizer.step(learning_rate=0.1, norm=5.0, max_norm=10.0)
    assert parameter.tolist() == pytest.approx([1.0 * 0.95 - 0.1, -2.0 * 0.95 + 0.1])
    assert parameter.grad is None


def test_moments_hold_the_clipped_gradient() -> None:
    parameter, optimizer = make()
    set_gradient(parameter, [3.0, -4.0])
    optimizer.step(learning_rate=0.1, norm=optimizer.gradient_norm(), max_norm=1.0)
    tensors = optimizer.tensors()
    assert tensors["exp_avg/moving"].tolist() == pytest.approx([0.06, -0.08])
    assert tensors["exp_avg_sq/moving"].tolist() == pytest.approx([0.05 * 0.36, 0.05 * 0.64])
    assert tensors["step/moving"].item() == 1


def test_only_parameters_that_ask_for_a_gradient_are_held() -> None:
    _, optimizer = make()
    assert optimizer.num_parameters == 2
    assert set(optimizer.tensors()) == {"step/moving", "exp_avg/moving", "exp_avg_sq/moving"}


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_gradient_that_is_not_finite_shows_in_the_norm(bad: float) -> None:
    parameter, optimizer = make()
    set_gradient(parameter, [1.0, bad])
    assert not math.isfinite(optimizer.gradient_norm())


def test_without_gradients_the_norm_is_zero() -> None:
    assert make()[1].gradient_norm() == 0.0


def test_undo_puts_everything_back_bit_for_bit() -> None:
    parameter, optimizer = make()
    set_gradient(parameter, [3.0, -4.0])
    optimizer.step(learning_rate=0.1, norm=5.0, max_norm=1.0)
    before = {"weight": parameter.detach().clone(), **{n: t.clone() for n, t in optimizer.tensors().items()}}
    optimizer.remember()
    for _ in range(3):
        set_gradient(parameter, [0.1, 0.7])
        optimizer.step(learning_rate=0.1, norm=0.7, max_norm=1.0)
    set_gradient(parameter, [0.1, 0.7])
    optimizer.undo()
    after = {"weight": parameter.detach(), **optimizer.tensors()}
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert parameter.grad is None


def test_a_loaded_state_goes_on_as_the_saved_one() -> None:
    (first, saved), (second, loaded) = make(), make()
    for _ in range(2):
        set_gradient(first, [3.0, -4.0])
        saved.step(learning_rate=0.1, norm=5.0, max_norm=1.0)
    loaded.load_tensors({name: tensor.clone() for name, tensor in saved.tensors().items()})
    with torch.no_grad():
        second.copy_(first)
    for parameter, optimizer in ((first, saved), (second, loaded)):
        set_gradient(parameter, [-1.0, 0.5])
        optimizer.step(learning_rate=0.1, norm=1.1, max_norm=2.0)
    assert torch.equal(first, second)


def test_a_state_of_another_model_is_refused() -> None:
    with pytest.raises(KeyError, match="moving"):
        make()[1].load_tensors({})
