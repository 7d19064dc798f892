"""docs/algorithms.md describes every recipe with the settings that it has."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any

import pytest

from common.config_load import flatten
from learner.recipes import RECIPES

PAGE = (Path(__file__).resolve().parent.parent / "docs" / "algorithms.md").read_text(encoding="utf-8")
SECTIONS = dict(re.findall(r"^### (\S+)\n(.*?)(?=^##|\Z)", PAGE, re.MULTILINE | re.DOTALL))


def as_toml(value: Any) -> Any:
    return [as_toml(entry) for entry in value] if isinstance(value, tuple) else value


def test_every_recipe_has_a_section_and_a_row_in_the_order_of_the_table() -> None:
    assert list(SECTIONS) == list(RECIPES)
    assert re.findall(r"^\| \[`(.+?)`\]\(#", PAGE, re.MULTILINE) == list(RECIPES)


@pytest.mark.parametrize("name", RECIPES)
def test_settings_of_a_section_are_those_of_the_recipe(name: str) -> None:
    (block,) = re.findall(r"```toml\n(.*?)```", SECTIONS[name], re.DOTALL)
    settings = dict(flatten(tomllib.loads(block)))
    assert settings.pop("recipe") == name
    assert settings == {key: as_toml(value) for key, value in RECIPES[name].settings.items()}


@pytest.mark.parametrize("name", RECIPES)
def test_a_section_says_what_it_must(name: str) -> None:
    text = SECTIONS[name]
    assert RECIPES[name].summary in text
    assert RECIPES[name].source in text
    for part in ("Loss", "When", "Known failure", "Deviations"):
        assert re.search(rf"^- \*\*{part}\.\*\* \S.+\.$", text, re.MULTILINE), part
    assert len(text) < 3000  # half a page


def test_links_of_the_table_lead_to_sections() -> None:
    anchors = {re.sub(r"[^a-z0-9-]", "", name) for name in SECTIONS}
    found = re.findall(r"\]\(#([^)]+)\)", PAGE)
    assert len(found) == len(RECIPES)
    assert set(found) == anchors
