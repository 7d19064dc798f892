"""Every TOML file that a run could be given is a valid configuration."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from buffer.tasks import TASKS
from common.config_load import load_config
from learner.recipes import recipe_settings

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = ("deploy", "benchmarks", "docs", "tests")
CONFIGS = sorted(path.relative_to(ROOT) for folder in FOLDERS for path in (ROOT / folder).rglob("*.toml"))


@pytest.mark.parametrize("path", CONFIGS, ids=str)
def test_config_file_is_valid(path: Path) -> None:
    config = load_config(ROOT / path, recipes=recipe_settings())
    kind, _, name = config.data.source.partition(":")
    assert kind != "task" or name in TASKS


def test_the_quick_start_is_among_the_files_checked() -> None:
    assert Path("deploy/configs/quickstart.toml") in CONFIGS


def test_no_toml_file_hides_outside_the_folders_checked() -> None:
    """Of the files that belong to the project; one's own task may lie beside them."""
    if not (ROOT / ".git").exists():
        pytest.skip("not a git checkout: which files belong to the project is not known")
    listed = subprocess.run(
        ["git", "-c", "safe.directory=*", "ls-files", "*.toml"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert {Path(line) for line in listed.stdout.splitlines()} - set(CONFIGS) == {Path("pyproject.toml")}
