"""The command line: quick help, one-line errors with the right status, and what each command does."""

from __future__ import annotations

import json
import subprocess
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from buffer.archive import TrajectoryArchive
from common.config import RunConfig, Table
from common.config_load import valid_keys
from common.errors import RunFailedError
from deploy.cli import CHANGEABLE, find_config, main
from deploy.run_dir import RunDir, new_run_dir
from deploy.settings_help import all_settings, describe_settings, toml_of
from learner.recipes import RECIPES
from tests.trajectories import make_rollout

ROOT = Path(__file__).resolve().parent.parent


class Summary:
    """What the fake of a run returns."""

    def __init__(self, exit_status: int = 0) -> None:
        self.exit_status = exit_status

    def __str__(self) -> str:
        return "all updates done"


class Launches:
    """Takes the place of deploy/launch.py and remembers what was started."""

    def __init__(self, result: Callable[[], Summary]) -> None:
        self.configs: list[RunConfig] = []
        self.run_dirs: list[RunDir] = []
        self.result = result

    def train(self, config: RunConfig, run_dir: RunDir) -> Summary:
        self.configs.append(config)
        self.run_dirs.append(run_dir)
        return self.result()


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> Launches:
    fake = Launches(Summary)
    module = types.ModuleType("deploy.launch")
    module.train = fake.train  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "deploy.launch", module)
    return fake


@pytest.fixture(autouse=True)
def working_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def make_run(path: str = "run", *, updates: int = 0, **settings: Any) -> RunDir:
    run_dir, _ = new_run_dir(RunConfig(run_dir=path, **settings))
    for update in range(1, updates + 1):
        run_dir.record({"kind": "update", "update": update, "version": update, "time_s": float(update)})
    return run_dir


def run_python(*arguments: str, cwd: Path = ROOT) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, *arguments], cwd=cwd, capture_output=True, text=True, timeout=120)


# Help


def test_help_loads_nothing_heavy() -> None:
    code = "import sys; from deploy.cli import main\ntry: main(['--help'])\nexcept SystemExit: pass\n"
    code += (
        "print('loaded', *sorted({'torch', 'ray', 'vllm', 'transformers', 'matplotlib', 'pyarrow'} & set(sys.modules)))"
    )
    result = run_python("-c", code)
    assert result.stdout.splitlines()[-1] == "loaded", result.stderr


def test_command_runs_as_a_module_too() -> None:
    result = run_python("-m", "deploy.cli", "--help")
    assert result.returncode == 0, result.stderr
    for command in ("train", "resume", "recipes", "config", "doctor", "rollouts", "report"):
        assert f"\n    {command} " in result.stdout


@pytest.mark.parametrize("command", ["train", "resume", "recipes", "config", "doctor", "rollouts", "report"])
def test_every_command_has_help(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main([command, "--help"])
    assert ended.value.code == 0
    assert f"usage: slipstream {command}" in capsys.readouterr().out


def test_help_is_as_wide_as_its_texts_on_any_terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    with pytest.raises(SystemExit):
        main(["train", "--help"])
    lines = capsys.readouterr().out.splitlines()
    assert "[KEY=VALUE ...]" in lines[0]
    assert max(map(len, lines)) <= 120


def test_no_command_shows_help_and_fails(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main([])
    assert ended.value.code == 2
    assert "commands:" in capsys.readouterr().out


def test_version_is_the_installed_one(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--version"])
    assert capsys.readouterr().out.startswith("slipstream")


# Settings in words


def test_every_setting_is_explained() -> None:
    settings = {setting.key: setting for setting in all_settings()}
    assert set(settings) == set(valid_keys())
    assert [key for key, setting in settings.items() if not setting.description] == []


def test_every_table_says_what_it_is_for() -> None:
    for name, field in RunConfig.model_fields.items():
        if isinstance(field.annotation, type) and issubclass(field.annotation, Table):
            assert f"[{name}]  " in describe_settings([name])
            assert (field.annotation.__doc__ or "").startswith(f"`[{name}]`: ")


@pytest.mark.parametrize(
    ("key", "kind", "default"),
    [
        ("seed", "whole number ≥ 0", "0"),
        ("model.path", "text", '"builtin:tiny-sort"'),
        ("model.dtype", '"float32" | "bfloat16"', '"float32"'),
        ("data.epochs", "whole number ≥ 1, or none", "none"),
        ("engine.enforce_eager", "true or false", "true"),
        ("engine.gpu_memory_utilization", "number > 0, ≤ 1", "0.85"),
        ("algorithm.policy_lambda", '"length_adaptive" or number ≥ 0, ≤ 1', '"length_adaptive"'),
        ("data.options", "table", "{}"),
    ],
)
def test_kind_and_default_of_a_setting_are_readable(key: str, kind: str, default: str) -> None:
    setting = next(setting for setting in all_settings() if setting.key == key)
    assert (setting.kind, setting.default) == (kind, default)


def test_config_shows_chosen_settings_alone(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config", "groups.size", "staleness"]) == 0
    out = capsys.readouterr().out
    assert "groups.size = 1    whole number ≥ 1\n      Members of a group" in out
    assert "staleness.bound" in out
    assert "groups.straggler" not in out
    assert "[rollout]" not in out


def test_config_of_an_unknown_name_suggests_one(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config", "stalenes"]) == 2
    assert (
        capsys.readouterr().err
        == "slipstream: error: stalenes is neither a setting nor a table: did you mean staleness?\n"
    )


# Recipes


def test_recipes_are_listed_with_their_source(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["recipes"]) == 0
    out = capsys.readouterr().out
    for recipe in RECIPES.values():
        assert recipe.summary in out
        assert recipe.source in out


def test_recipe_shows_its_settings_as_they_are_written(capsys: pytest.CaptureFixture[str]) -> None:
    name = next(iter(RECIPES))
    assert main(["recipes", name]) == 0
    out = capsys.readouterr().out
    for key, value in RECIPES[name].settings.items():
        assert f"{key} = {toml_of(value)}" in out
    assert main(["recipes", "nope"]) == 2


# Train


def test_train_starts_a_run_with_the_merged_settings(
    launches: Launches, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "my.toml").write_text("max_updates = 7\n[rollout]\nslots = 9\n")
    assert main(["train", "--config", "my.toml", "rollout.slots=10", "run_dir=here"]) == 0
    (config,) = launches.configs
    assert (config.max_updates, config.rollout.slots, config.run_dir) == (7, 10, str(tmp_path / "here"))
    assert RunDir(tmp_path / "here").config() == config
    captured = capsys.readouterr()
    assert captured.out == "all updates done\n"
    assert f"run directory: {tmp_path / 'here'}" in captured.err


def test_settings_may_stand_on_both_sides_of_an_option(launches: Launches) -> None:
    assert main(["train", "seed=1", "--config", "quickstart", "max_updates=3", "rollout.slots=4"]) == 0
    (config,) = launches.configs
    assert (config.seed, config.max_updates, config.rollout.slots) == (1, 3, 4)


def test_config_that_comes_along_is_found_by_name_and_an_own_file_first(tmp_path: Path) -> None:
    assert find_config("quickstart") == ROOT / "deploy/configs/quickstart.toml"
    assert find_config("nothing.toml") == Path("nothing.toml")
    (tmp_path / "quickstart").touch()
    assert find_config("quickstart") == Path("quickstart")


def test_dry_run_prints_the_plan_and_makes_nothing(
    launches: Launches, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["train", "--dry-run", "max_updates=3"]) == 0
    assert "3 updates take 192 prompts" in capsys.readouterr().out
    assert launches.configs == []
    assert list(tmp_path.iterdir()) == []


def test_status_of_a_stopped_run_is_passed_on(launches: Launches) -> None:
    launches.result = lambda: Summary(exit_status=143)
    assert main(["train"]) == 143


def test_failed_run_is_one_line_and_the_place_of_the_logs(
    launches: Launches, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail() -> Summary:
        raise RunFailedError("actor-0 died 4 times;\nthe last time: killed")

    launches.result = fail
    assert main(["train", "run_dir=here"]) == 1
    lines = capsys.readouterr().err.splitlines()
    assert lines[-1] == "slipstream: error: actor-0 died 4 times; the last time: killed"
    assert lines[-2] == f"logs of every service: {tmp_path / 'here' / 'logs'}"


def test_defect_keeps_its_traceback(launches: Launches, capsys: pytest.CaptureFixture[str]) -> None:
    launches.result = lambda: 1 / 0  # type: ignore[return-value, assignment]
    assert main(["train"]) == 70
    err = capsys.readouterr().err
    assert "Traceback" in err
    assert "ZeroDivisionError" in err
    assert err.endswith("slipstream: internal error: this is a defect; the lines above say where\n")


def test_interrupt_is_no_traceback(launches: Launches, capsys: pytest.CaptureFixture[str]) -> None:
    def interrupt() -> Summary:
        raise KeyboardInterrupt

    launches.result = interrupt
    assert main(["train"]) == 130
    assert capsys.readouterr().err.endswith("slipstream: interrupted\n")


@pytest.mark.parametrize(
    ("arguments", "status", "says"),
    [
        (["train", "--config", "absent.toml"], 2, "config file absent.toml does not exist"),
        (["train", "rollout.slot=3"], 2, "did you mean rollout.slots?"),
        (["train", "rollout.slots=0"], 2, "rollout.slots = 0: Input should be greater than or equal to 1"),
        (["train", "--dry-run", "data.source=absent.jsonl"], 2, "absent.jsonl"),
        (["resume", "absent"], 2, "absent does not exist"),
        (["report", "."], 2, "has no config.toml: it is not a run directory"),
        (["rollouts", "absent"], 2, "absent does not exist"),
        (["rollouts", "run", "--outcome", "evaluation"], 2, "there are trained, dropped, dropped_stale"),
    ],
)
def test_error_of_the_user_is_one_line(
    launches: Launches, arguments: list[str], status: int, says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == status
    err = capsys.readouterr().err
    assert err.count("\n") == 1
    assert err.startswith("slipstream: error: ")
    assert says in err
    assert launches.configs == []


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["train", "--learner.learning_rate=3"], "settings are written without dashes: learner.learning_rate=3"),
        (["train", "--seed", "3"], "settings are written without dashes: seed=VALUE"),
        (["train", "--nope"], "unrecognized argument: --nope; see slipstream train --help"),
        (["doctor", "x=1"], "unrecognized argument: x=1"),
        (["rollouts", "run", "--last", "0"], "0 is less than 1"),
        (["rollouts", "run", "--worst", "--best"], "not allowed with"),
        (["trian"], "invalid choice: 'trian'"),
    ],
)
def test_wrong_arguments_are_explained(arguments: list[str], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == 2
    assert says in capsys.readouterr().err


def test_second_run_in_a_directory_is_refused(launches: Launches, capsys: pytest.CaptureFixture[str]) -> None:
    make_run("run", updates=1)
    assert main(["train", "run_dir=run"]) == 2
    assert "slipstream resume run" in capsys.readouterr().err


def test_directory_is_locked_while_the_run_goes_on(launches: Launches, capsys: pytest.CaptureFixture[str]) -> None:
    inner: list[int] = []

    def start_again() -> Summary:
        inner.append(main(["train", "run_dir=run", "max_updates=3"]))
        return Summary()

    launches.result = start_again
    assert main(["train", "run_dir=run"]) == 0
    assert inner == [1]
    assert "is in use by process" in capsys.readouterr().err
    assert launches.run_dirs[0].config().max_updates == 100  # untouched


# Resume


def test_resume_goes_on_with_the_settings_of_the_run(launches: Launches, tmp_path: Path) -> None:
    make_run("run", updates=3, max_updates=50, seed=4)
    assert main(["resume", "run"]) == 0
    (config,) = launches.configs
    assert (config.max_updates, config.seed, config.run_dir) == (50, 4, str(tmp_path / "run"))


def test_resume_changes_what_does_not_change_the_run(launches: Launches) -> None:
    run_dir = make_run("run", updates=3)
    assert main(["resume", "run", "max_updates=200", "engine.kv_cache_mib=64"]) == 0
    assert launches.configs[0].max_updates == 200
    assert run_dir.config().engine.kv_cache_mib == 64


def test_resume_refuses_what_would(launches: Launches, capsys: pytest.CaptureFixture[str]) -> None:
    run_dir = make_run("run", updates=3)
    before = run_dir.config_file.read_text()
    assert main(["resume", "run", "max_updates=200", "groups.size=4"]) == 2
    assert "groups.size cannot be changed in a run that has begun" in capsys.readouterr().err
    assert run_dir.config_file.read_text() == before
    assert launches.configs == []


def test_what_can_be_changed_are_real_settings() -> None:
    for name in CHANGEABLE:
        assert any(key == name or key.startswith(f"{name}.") for key in valid_keys()), name


def test_resume_of_a_complete_run_says_how_to_go_on(launches: Launches, capsys: pytest.CaptureFixture[str]) -> None:
    save_checkpoint(make_run("run", updates=3, max_updates=3), 3)
    assert main(["resume", "run"]) == 2
    assert "has made its 3 updates: raise max_updates" in capsys.readouterr().err
    assert main(["resume", "run", "max_updates=4"]) == 0


def test_restarted_job_goes_on_with_its_run(launches: Launches, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["train", "--or-resume", "run_dir=run", "max_updates=3", "seed=8"]
    assert main(command) == 0  # nothing there yet
    launches.run_dirs[0].record({"kind": "update", "update": 1})
    assert main(command) == 0
    assert [config.seed for config in launches.configs] == [8, 8]
    launches.run_dirs[0].record({"kind": "update", "update": 3})
    assert main(command) == 0  # the last updates were made and not saved: they are to be made again
    assert len(launches.configs) == 3
    save_checkpoint(launches.run_dirs[0], 3)
    assert main(command) == 0
    assert len(launches.configs) == 3
    assert "nothing to do" in capsys.readouterr().err
    assert main([*command, "max_updates=5"]) == 0  # what may change and is said on the command line counts
    assert launches.configs[-1].max_updates == 5


def save_checkpoint(run_dir: RunDir, updates: int) -> None:
    folder = run_dir.checkpoints / f"update-{updates:08d}"
    folder.mkdir(parents=True)
    (folder / "complete.json").touch()


def test_a_checkpoint_whose_saving_was_not_finished_does_not_count(launches: Launches) -> None:
    run_dir = make_run("run", updates=3, max_updates=3)
    (run_dir.checkpoints / "update-00000003").mkdir(parents=True)
    assert run_dir.saved_updates() == 0
    assert main(["resume", "run"]) == 0


# Reading a run


def test_rollouts_prints_what_was_asked_for(capsys: pytest.CaptureFixture[str]) -> None:
    archive = TrajectoryArchive(make_run().trajectories)
    for number, reward in enumerate((0.5, 0.0, 1.0)):
        trajectory = make_rollout([1], [2], number, sample_id=number, reward=reward)
        archive.add(trajectory, outcome="trained", batch_id=0, version=3)
    archive.close()

    def sample_ids(*options: str) -> list[int]:
        assert main(["rollouts", "run", "--json", *options]) == 0
        return [json.loads(line)["sample_id"] for line in capsys.readouterr().out.splitlines()]

    assert sample_ids() == [2, 1, 0]
    assert sample_ids("--worst", "--last", "1") == [1]
    assert sample_ids("--best") == [2, 0, 1]
    assert sample_ids("--version", "0") == [0]
    assert sample_ids("--outcome", "dropped") == []
    assert sample_ids("--prompt", "sort-digits/17", "--last", "2") == [2, 1]
    assert main(["rollouts", "run"]) == 0
    assert "⟦<2>⟧" in capsys.readouterr().out


def test_report_can_be_made_at_any_time(capsys: pytest.CaptureFixture[str]) -> None:
    run_dir = make_run("run", updates=2)
    assert main(["report", "run"]) == 0
    assert capsys.readouterr().out == f"{run_dir.path / 'report.html'}\n"


def test_output_that_nobody_reads_ends_quietly(tmp_path: Path) -> None:
    command = f"{sys.executable} -m deploy.cli config | head -n 1; echo ${{PIPESTATUS[0]}}"
    result = subprocess.run(["bash", "-c", command], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert result.stderr == ""
    assert result.stdout.splitlines()[-1] in ("0", "141")


def test_doctor_fails_when_something_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[bool] = []

    def examine(console: object, *, quick: bool) -> int:
        asked.append(quick)
        return 2

    monkeypatch.setattr("deploy.doctor.examine", examine)
    assert main(["doctor", "--quick"]) == 1
    assert asked == [True]


def test_terminal_without_our_characters_is_no_error() -> None:
    code = "from deploy.cli import main; main(['config', 'seed'])"
    result = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, env={"PYTHONIOENCODING": "ascii"}, timeout=120
    )
    assert result.returncode == 0, result.stderr
    assert b"whole number ? 0" in result.stdout
