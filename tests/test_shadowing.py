"""A stranger's package under one of our names is refused at start, by name."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def import_deploy(cwd: Path, pythonpath: str = "", *, module: bool = True) -> subprocess.CompletedProcess[str]:
    """Import `deploy` in a fresh interpreter started in `cwd`; `module`: `cwd` is on the path, as under `python -m`."""
    argv = [sys.executable, *([] if module else ["-P"]), "-c", "import deploy"]
    path = os.pathsep.join(filter(None, [pythonpath, str(ROOT)]))
    env = {**os.environ, "PYTHONPATH": path}
    return subprocess.run(argv, cwd=cwd, env=env, capture_output=True, text=True, timeout=60)


def make_package(folder: Path, name: str) -> Path:
    (folder / name).mkdir()
    (folder / name / "__init__.py").write_text("raise RuntimeError('imported')\n")
    return folder / name


def test_foreign_package_in_the_current_directory_ends_python_dash_m(tmp_path: Path) -> None:
    theirs = make_package(tmp_path, "common")
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    argv = [sys.executable, "-m", "deploy.cli", "--help"]
    result = subprocess.run(argv, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=60)
    assert result.returncode == 2
    assert result.stderr.count("\n") == 1
    assert str(theirs) in result.stderr
    assert "start from another directory" in result.stderr


def test_foreign_package_in_the_current_directory_is_refused_off_the_path_too(tmp_path: Path) -> None:
    """Ray workers put the driver's current directory first on their path, whatever the driver's own path says."""
    make_package(tmp_path, "buffer")
    result = import_deploy(tmp_path, module=False)
    assert result.returncode == 2
    assert "`buffer`" in result.stderr


def test_foreign_module_on_pythonpath_is_refused(tmp_path: Path) -> None:
    (tmp_path / "lib").mkdir()
    (tmp_path / "lib" / "learner.py").write_text("")
    (tmp_path / "empty").mkdir()
    result = import_deploy(tmp_path / "empty", pythonpath=str(tmp_path / "lib"))
    assert result.returncode == 2
    assert str(tmp_path / "lib" / "learner.py") in result.stderr


def test_folder_of_that_name_without_code_is_harmless(tmp_path: Path) -> None:
    (tmp_path / "actors").mkdir()
    result = import_deploy(tmp_path)
    assert result.returncode == 0, result.stderr


def test_our_own_packages_are_accepted_from_anywhere(tmp_path: Path) -> None:
    assert import_deploy(tmp_path).returncode == 0
    assert import_deploy(ROOT).returncode == 0
