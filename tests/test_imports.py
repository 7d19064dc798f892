"""Which package may import which, and what must stay cheap to import."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent

# common <- buffer <- actors, learner <- deploy <- benchmarks
MAY_IMPORT: dict[str, set[str]] = {
    "common": set(),
    "buffer": {"common"},
    "actors": {"common", "buffer"},
    "learner": {"common", "buffer"},
    "deploy": {"common", "buffer", "actors", "learner"},
    "benchmarks": {"common", "buffer", "actors", "learner", "deploy"},
}


def imported_roots(tree: ast.AST) -> set[str]:
    """First component of every absolute import anywhere below `tree`, those inside functions too."""
    roots: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            roots |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            roots.add(node.module.partition(".")[0])
    return roots


def outside_functions(tree: ast.Module) -> ast.Module:
    """`tree` without the bodies of its functions and methods."""

    class Strip(ast.NodeTransformer):
        def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
            return None

        def visit_AsyncFunctionDef(self, node: ast.AsyncFunctionDef) -> None:
            return None

    return Strip().visit(tree)


def sources(package: str) -> Iterator[tuple[str, ast.Module]]:
    """Path relative to the repository, and syntax tree, of each module of a package."""
    for path in sorted((ROOT / package).rglob("*.py")):
        yield path.relative_to(ROOT).as_posix(), ast.parse(path.read_text(encoding="utf-8"))


def may_import_ray(path: str) -> bool:
    return path.endswith("/service.py") or path == "buffer/client.py" or path.startswith(("deploy/", "benchmarks/"))


def may_import_vllm(path: str) -> bool:
    return path.startswith(("actors/engine", "benchmarks/")) or path == "actors/weight_receiver.py"


def test_imports_are_found_wherever_they_stand() -> None:
    tree = ast.parse("import a.b\ndef f():\n    from c.d import e\nclass K:\n    def m(self):\n        import g\n")
    assert imported_roots(tree) == {"a", "c", "g"}
    assert imported_roots(outside_functions(tree)) == {"a"}


@pytest.mark.parametrize("package", MAY_IMPORT)
def test_packages_import_one_way(package: str) -> None:
    forbidden = set(MAY_IMPORT) - MAY_IMPORT[package] - {package} | {"tests"}
    wrong = {path: roots for path, tree in sources(package) if (roots := imported_roots(tree) & forbidden)}
    assert not wrong


@pytest.mark.parametrize("package", MAY_IMPORT)
def test_ray_is_imported_by_service_shells_and_deployment_alone(package: str) -> None:
    wrong = [path for path, tree in sources(package) if "ray" in imported_roots(tree) and not may_import_ray(path)]
    assert not wrong


@pytest.mark.parametrize("package", MAY_IMPORT)
def test_vllm_is_imported_by_the_engine_and_the_weight_receiver_alone(package: str) -> None:
    wrong = []
    for path, tree in sources(package):
        # The publisher needs vLLM's senders on GPUs only: a learner on CPUs must not pay for the import.
        searched = outside_functions(tree) if path == "learner/publisher.py" else tree
        if "vllm" in imported_roots(searched) and not may_import_vllm(path):
            wrong.append(path)
    assert not wrong


@pytest.mark.parametrize("package", ["common", "buffer"])
def test_common_and_buffer_do_not_import_torch(package: str) -> None:
    wrong = [path for path, tree in sources(package) if imported_roots(tree) & {"torch", "transformers"}]
    assert not wrong


def loaded_by(modules: list[str]) -> set[str]:
    """Which of torch, ray and vllm are loaded once a fresh interpreter has imported `modules`."""
    code = f"import sys, importlib\nfor m in {modules!r}: importlib.import_module(m)\n"
    code += "print(*sorted({'torch', 'ray', 'vllm'} & set(sys.modules)))"
    result = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stderr
    return set(result.stdout.split())


def test_reading_the_configuration_loads_neither_torch_nor_ray_nor_vllm() -> None:
    assert loaded_by(["common.config"]) == set()


def test_common_and_buffer_load_no_torch_through_others() -> None:
    modules = [
        path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
        for package in ("common", "buffer")
        for path, _ in sources(package)
        if not may_import_ray(path)
    ]
    assert loaded_by(modules) == set()


def test_this_check_notices_what_is_loaded() -> None:
    assert loaded_by(["ray"]) == {"ray"}
