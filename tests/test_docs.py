"""What the pages say can be done as they say it: settings, commands, configs, files and links exist."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest

from common.config_load import annotation_of, load_config
from deploy import cli
from learner.recipes import RECIPES, recipe_settings

ROOT = Path(__file__).resolve().parent.parent
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
CODE = re.compile(r"`([^`\n]+)`")
TABLES = {"model", "data", "environment", "reward", "rollout", "engine", "groups", "staleness", "buffer", "algorithm"}
TABLES |= {"value", "learner", "evaluation", "checkpoint", "weights", "metrics", "supervision", "ray"}
pages = pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)


def blocks(page: Path, language: str) -> Iterator[str]:
    for name, text in BLOCK.findall(page.read_text(encoding="utf-8")):
        if name == language:
            yield text


def commands(page: Path) -> Iterator[str]:
    """Lines of shell blocks that call us, and such calls in running text."""
    text = page.read_text(encoding="utf-8")
    lines = [line for block in blocks(page, "bash") for line in block.splitlines()]
    for line in [*lines, *CODE.findall(BLOCK.sub("", text))]:
        words = line.partition("#")[0].strip()
        if re.match(r"(\.venv/bin/)?slipstream [a-z]", words):
            yield words.replace("[", "").replace("]", "").replace(" …", "")


def test_the_pages_are_found_and_have_something_to_check() -> None:
    readme = ROOT / "README.md"
    assert len(list(commands(readme))) >= 10
    assert len(list(blocks(readme, "toml"))) == 1
    assert len(PAGES) >= 4


def test_the_readme_says_how_the_command_is_found_before_it_is_used() -> None:
    lines = [line for block in blocks(ROOT / "README.md", "bash") for line in block.splitlines()]
    first = next(number for number, line in enumerate(lines) if line.startswith("slipstream "))
    assert any(line.startswith("source .venv/bin/activate") for line in lines[:first])


def test_the_readme_lists_every_exit_status() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    for status in (0, 1, 2, cli.INTERNAL_ERROR):
        assert f"| {status} | " in text


@pages
def test_settings_named_on_a_page_exist(page: Path) -> None:
    text = BLOCK.sub("", page.read_text(encoding="utf-8"))
    names = {name for code in CODE.findall(text) for name in re.findall(r"\b[a-z]+\.[a-z][a-z_0-9]*\b", code)}
    ours = {
        name
        for name in names
        if name.partition(".")[0] in TABLES and not name.endswith((".py", ".toml", ".md", ".jsonl"))
    }
    assert {name for name in ours if annotation_of(name) is None} == set()


@pages
def test_commands_on_a_page_can_be_given(page: Path) -> None:
    for command in commands(page):
        words = shlex.split(command)[1:]
        given = [word for word in words if word != "key=value"]
        if given[0] in ("resume", "report", "rollouts", "recipes", "config", "doctor", "train") and len(given) == 1:
            assert f"    {given[0]} " in cli.make_parser().format_help()
            continue
        cli._parse(given)


@pages
def test_configs_on_a_page_are_valid(page: Path, tmp_path: Path) -> None:
    for text in blocks(page, "toml"):
        (tmp_path / "page.toml").write_text(text, encoding="utf-8")
        assert load_config(tmp_path / "page.toml", recipes=recipe_settings())


@pages
def test_links_of_a_page_lead_somewhere(page: Path) -> None:
    links = re.findall(r"\]\(([^)#\s]+)", page.read_text(encoding="utf-8"))
    missing = [link for link in links if "://" not in link and not (page.parent / link).exists()]
    assert missing == []


def test_recipes_of_the_readme_are_those_there_are() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    (row,) = [line for line in readme.splitlines() if line.startswith("| `recipe` |")]
    assert set(CODE.findall(row)) - {"recipe"} <= set(RECIPES)


def test_files_of_the_tree_exist() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    (tree,) = [text for name, text in BLOCK.findall(readme) if not name and text.startswith("common/")]
    folder, found = ROOT, 0
    for line in tree.splitlines():
        top = re.match(r"([a-z]+)/", line)
        folder = ROOT / top.group(1) if top else folder
        for name in re.findall(r"\b[a-z_]+(?:\.py|/)", line):
            assert (folder / name if not top else ROOT / name).exists(), name
            found += 1
    assert found > 20
