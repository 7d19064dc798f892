"""The table of recipes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from common.config_load import load_config
from learner.recipes import RECIPES, recipe_settings


@pytest.mark.parametrize("name", RECIPES)
def test_every_recipe_is_a_valid_configuration_by_itself(name: str) -> None:
    config = load_config(None, [f"recipe={name}"], recipes=recipe_settings())
    for key, value in RECIPES[name].settings.items():
        table, setting = key.split(".")
        assert getattr(getattr(config, table), setting) == value


@pytest.mark.parametrize("name", RECIPES)
def test_every_recipe_says_what_it_is_and_where_it_comes_from(name: str) -> None:
    assert RECIPES[name].name == name
    assert RECIPES[name].summary.endswith(".")
    assert "\n" not in RECIPES[name].summary
    assert RECIPES[name].source


def test_sao_has_the_settings_of_its_paper() -> None:
    config = load_config(None, ["recipe=sao"], recipes=recipe_settings())
    algorithm = config.algorithm
    assert (algorithm.reference, algorithm.trust_region) == ("behaviour", "mask")
    assert (algorithm.eps_low, algorithm.eps_high) == (0.3, 5.0)  # offsets: ratios from 0.7 to 6
    assert (algorithm.policy_lambda, algorithm.lambda_alpha, algorithm.value_lambda) == ("length_adaptive", 1.5, 1.0)
    assert (config.value.updates_per_batch, config.value.freeze_attention) == (2, True)
    assert config.groups.size == 1


def test_recipes_name_algorithms_and_not_step_sizes_or_sizes_of_a_run() -> None:
    keys = {key for recipe in RECIPES.values() for key in recipe.settings if not key.startswith("algorithm.")}
    of_value = {f"value.{name}" for name in ("updates_per_batch", "warmup_batches", "freeze_attention")}
    assert keys == {"groups.size", "value.clip_range", "value.granularity"} | of_value


def test_a_file_may_override_a_recipe() -> None:
    config = load_config(None, ["recipe=grpo", "groups.size=4"], recipes=recipe_settings())
    assert config.groups.size == 4


def test_the_table_loads_neither_torch_nor_ray() -> None:
    code = "import learner.recipes, sys; print(*{'torch', 'ray', 'transformers'} & set(sys.modules))"
    root = Path(__file__).resolve().parent.parent
    result = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True, timeout=60)
    assert (result.returncode, result.stdout.strip()) == (0, "")
