"""Environments that come with Slipstream, by the name that `environment.name` takes."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from actors.environment import Environment
from actors.environments.second_try import SecondTry
from actors.environments.single_turn import SingleTurn

ENVIRONMENTS: Mapping[str, Callable[[], Environment]] = {"single-turn": SingleTurn, "second-try": SecondTry}
