"""Settings: who wins, what is refused and in which words, and the way out to TOML and back."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from common.config import RunConfig, impossible_combinations
from common.config_load import dump_config, load_config, nearest, parse_override, valid_keys, validate
from common.errors import ConfigError

ROOT = Path(__file__).resolve().parent.parent
KEYS = list(valid_keys())
RECIPES: dict[str, dict[str, Any]] = {
    "sao": {},
    "grouped": {
        "algorithm.advantage": "group_mean",
        "algorithm.value": "none",
        "groups.size": 8,
        "groups.straggler": "close",
        "groups.close_at": 6,
    },
}


def load(tmp_path: Path, toml: str, *overrides: str) -> RunConfig:
    path = tmp_path / "run.toml"
    path.write_text(toml)
    return load_config(path, overrides, recipes=RECIPES)


def complaint(tmp_path: Path, toml: str, *overrides: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load(tmp_path, toml, *overrides)
    assert "\n" not in str(caught.value)
    return str(caught.value)


# Precedence


def test_defaults_need_no_file() -> None:
    assert load_config(None, recipes=RECIPES) == RunConfig()


def test_recipe_beats_defaults_file_beats_recipe_command_line_beats_file(tmp_path: Path) -> None:
    assert RunConfig().groups.size == 1
    assert load(tmp_path, 'recipe = "grouped"').groups.size == 8
    toml = 'recipe = "grouped"\n[groups]\nsize = 16\n'
    assert load(tmp_path, toml).groups.size == 16
    assert load(tmp_path, toml, "groups.size=32").groups.size == 32
    assert load(tmp_path, toml, "groups.size=32").groups.close_at == 6


def test_recipe_of_the_command_line_beats_the_file(tmp_path: Path) -> None:
    config = load(tmp_path, 'recipe = "sao"', "recipe=grouped")
    assert (config.recipe, config.groups.size) == ("grouped", 8)


def test_last_of_two_equal_overrides_wins(tmp_path: Path) -> None:
    assert load(tmp_path, "", "seed=1", "seed=2").seed == 2


def test_options_of_a_source_are_merged_key_by_key(tmp_path: Path) -> None:
    config = load(tmp_path, "[data.options]\na = 1\nb = 2\n", "data.options.b=3", "data.options.c=x")
    assert config.data.options == {"a": 1, "b": 3, "c": "x"}


# Values of overrides


@pytest.mark.parametrize(
    ("word", "key", "value"),
    [
        ("max_updates=7", "max_updates", 7),
        (" max_updates = 7 ", "max_updates", 7),
        ("learner.learning_rate=3e-4", "learner.learning_rate", 3e-4),
        ("engine.enforce_eager=false", "engine.enforce_eager", False),
        ("model.path=builtin:tiny-sort", "model.path", "builtin:tiny-sort"),
        ('model.path="a b"', "model.path", "a b"),
        ("data.system_prompt=x = y", "data.system_prompt", "x = y"),
        ("run_dir=2026-08-01", "run_dir", "2026-08-01"),
        ("run_dir=7", "run_dir", "7"),
        ("data.system_prompt=", "data.system_prompt", ""),
        ('data.options={a = 1, b = "x"}', "data.options", {"a": 1, "b": "x"}),
        ("data.options.levels=[1, 2]", "data.options.levels", [1, 2]),
    ],
)
def test_override_is_read_as_toml_or_as_text(word: str, key: str, value: Any) -> None:
    assert parse_override(word) == (key, value)


@pytest.mark.parametrize("word", ["train", "=3", "--seed"])
def test_word_without_key_or_value_is_refused(word: str) -> None:
    with pytest.raises(ConfigError, match="not of the form key=value"):
        parse_override(word)


def test_none_unsets_what_may_be_unset(tmp_path: Path) -> None:
    toml = "[learner]\ntrainable_layers = 2\n"
    assert load(tmp_path, toml).learner.trainable_layers == 2
    assert load(tmp_path, toml, "learner.trainable_layers=none").learner.trainable_layers is None
    assert load(tmp_path, '[learner]\ntrainable_layers = "none"\n').learner.trainable_layers is None


def test_none_is_a_choice_where_it_is_one(tmp_path: Path) -> None:
    config = load(tmp_path, 'recipe = "grouped"', "algorithm.value=none")
    assert config.algorithm.value == "none"


# Refusals


@pytest.mark.parametrize(
    ("wrong", "suggestion"),
    [
        ("rollout.slot=3", "rollout.slots"),
        ("rollouts.slots=3", "rollout.slots"),
        ("slots=3", "rollout.slots"),
        ("groups.slots=3", "rollout.slots"),
        ("learning_rate=3", "value.learning_rate"),
        ("max_update=3", "max_updates"),
        ("algorithm.epsilon_low=3", "algorithm.eps_low"),
    ],
)
def test_unknown_key_names_the_nearest(tmp_path: Path, wrong: str, suggestion: str) -> None:
    assert complaint(tmp_path, "", wrong).startswith(
        f"{wrong.partition('=')[0]} is not a setting: did you mean {suggestion}?"
    )


def test_unknown_key_of_a_file_is_refused_too(tmp_path: Path) -> None:
    assert "rollout.slot is not a setting: did you mean rollout.slots?" in complaint(tmp_path, "[rollout]\nslot = 3\n")
    assert "rollouts is not a setting: did you mean rollout?" in complaint(tmp_path, "[rollouts]\nslots = 3\n")
    assert "qqqq is not a setting; `slipstream config` lists all" in complaint(tmp_path, "[qqqq]\nx = 3\n")


@given(key=st.sampled_from(KEYS), data=st.data())
def test_one_letter_too_few_is_refused_and_met_with_a_real_key(key: str, data: st.DataObject) -> None:
    where = data.draw(st.integers(0, len(key) - 1))
    wrong = key[:where] + key[where + 1 :]
    with pytest.raises(ConfigError) as caught:
        parse_override(f"{wrong}=1")
    assert str(caught.value).split("did you mean ")[1].split("?")[0] in KEYS


def test_no_suggestion_when_nothing_is_near() -> None:
    assert nearest("qqqq", KEYS) == ""


def test_table_given_as_a_value_says_what_to_set(tmp_path: Path) -> None:
    assert complaint(tmp_path, "", "model=qwen") == "model is a table: set one of its keys, such as model.path"
    assert "model is a table" in complaint(tmp_path, 'model = "qwen"')


@pytest.mark.parametrize(
    ("word", "says"),
    [
        ("rollout.slots=0", "rollout.slots = 0: Input should be greater than or equal to 1"),
        ("rollout.slots=many", "rollout.slots = 'many': Input should be a valid integer"),
        ("rollout.slots=1.5", "rollout.slots = 1.5: Input should be a valid integer"),
        ("learner.learning_rate=nan", "learner.learning_rate = nan: Input should be"),
        ("rollout.temperature=0", "rollout.temperature = 0: Input should be greater than 0"),
        ("staleness.on_exceeded=stop", "staleness.on_exceeded = 'stop': Input should be 'mask', 'drop' or 'wait'"),
        ("groups.size.x=1", "groups.size = {'x': 1}: Input should be a valid integer"),
        ("recipe=nope", "recipe = 'nope' is unknown"),
        ("recipe=goruped", "did you mean grouped?"),
        ("recipe=[1]", "recipe = '[1]' is unknown"),
    ],
)
def test_bad_value_is_refused_with_key_value_and_rule(tmp_path: Path, word: str, says: str) -> None:
    assert says in complaint(tmp_path, "", word)


def test_setting_of_two_kinds_names_both_rules_and_the_key_alone(tmp_path: Path) -> None:
    message = complaint(tmp_path, "", "algorithm.policy_lambda=2")
    assert message.startswith("algorithm.policy_lambda = 2: ")
    assert "'length_adaptive'" in message
    assert "less than or equal to 1" in message


def test_recipe_that_is_no_text_is_refused(tmp_path: Path) -> None:
    assert "recipe = ['sao'] is unknown" in complaint(tmp_path, 'recipe = ["sao"]')


def test_file_that_cannot_be_read_says_why(tmp_path: Path) -> None:
    for path, says in (
        (tmp_path / "absent.toml", "absent.toml does not exist"),
        (tmp_path, "cannot be read: Is a directory"),
    ):
        with pytest.raises(ConfigError, match=says):
            load_config(path, recipes=RECIPES)
    assert "is not valid TOML" in complaint(tmp_path, "seed = ")
    (tmp_path / "binary.toml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match="is not valid TOML"):
        load_config(tmp_path / "binary.toml", recipes=RECIPES)


def test_byte_order_mark_and_carriage_returns_are_harmless(tmp_path: Path) -> None:
    path = tmp_path / "windows.toml"
    path.write_bytes(b"\xef\xbb\xbfseed = 3\r\n[rollout]\r\nslots = 5\r\n")
    config = load_config(path, recipes=RECIPES)
    assert (config.seed, config.rollout.slots) == (3, 5)


GROUPED: dict[str, Any] = {"algorithm": {"advantage": "group_mean", "value": "none"}, "groups": {"size": 8}}


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"groups": {"size": 7}}, "buffer.batch_size = 64 is not a multiple of groups.size = 7"),
        ({"algorithm": {"value": "none"}}, "needs a value function"),
        ({"algorithm": {"advantage": "leave_one_out", "value": "none"}}, "compares members of a group"),
        ({**GROUPED, "algorithm": {"advantage": "group_mean"}}, "is not used by algorithm.advantage"),
        ({"algorithm": {"trust_region": "none"}}, "trains on stale tokens without any correction"),
        (
            {**GROUPED, "groups": {"size": 8, "straggler": "close"}},
            "needs groups.close_at between 2 and groups.size = 8",
        ),
        ({"groups": {"size": 8, "straggler": "close", "close_at": 9}}, "needs groups.close_at between 2 and"),
        ({**GROUPED, "groups": {"size": 8, "straggler": "convert", "close_at": 4}}, "which needs a value model"),
        ({"rollout": {"max_tokens": 64}}, "leaves no room for a response"),
        ({"environment": {"max_turns": 2}}, "has no effect on single-turn"),
    ],
)
def test_settings_that_cannot_work_together_are_refused_with_the_reason(settings: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError) as caught:
        validate(settings)
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "settings",
    [
        {"algorithm": {"trust_region": "none"}, "staleness": {"bound": 0}},
        {**GROUPED, "groups": {"size": 8, "straggler": "close", "close_at": 8}},
        {"groups": {"size": 8, "straggler": "convert", "close_at": 2}},
        {"rollout": {"max_tokens": 65}},
        {"environment": {"name": "second-try", "max_turns": 2}},
    ],
)
def test_limits_of_those_rules_are_allowed(settings: dict[str, Any]) -> None:
    assert impossible_combinations(validate(settings)) == []


def test_configuration_cannot_be_changed() -> None:
    with pytest.raises(ValidationError, match="frozen"):
        RunConfig().model = None  # type: ignore[assignment]


# Out and in again


def test_dump_can_be_given_to_config_again(tmp_path: Path) -> None:
    config = load(tmp_path, 'recipe = "grouped"\n[data.options]\na = [1, 2]\n', 'data.system_prompt=say "no" — now')
    assert load(tmp_path, dump_config(config)) == config


def test_dump_keeps_unset_what_the_recipe_would_set(tmp_path: Path) -> None:
    config = load(tmp_path, 'recipe = "grouped"', "groups.straggler=retry", "groups.close_at=none")
    assert config.groups.close_at is None
    assert load(tmp_path, dump_config(config)).groups.close_at is None


@given(
    data=st.fixed_dictionaries(
        {
            "seed": st.integers(0, 2**40),
            "run_dir": st.text(st.characters(exclude_categories=["Cs", "Cc"])),
            "learner": st.fixed_dictionaries({"learning_rate": st.floats(1e-12, 1e3), "beta1": st.floats(0, 0.999)}),
            "algorithm": st.fixed_dictionaries(
                {"policy_lambda": st.just("length_adaptive") | st.floats(0, 1), "entropy_coefficient": st.floats(0, 1)}
            ),
            "data": st.fixed_dictionaries(
                {
                    "epochs": st.none() | st.integers(1, 9),
                    "options": st.dictionaries(
                        st.text(max_size=4), st.integers() | st.booleans() | st.text(max_size=4)
                    ),
                }
            ),
        }
    )
)
def test_any_dump_reads_back_equal(data: dict[str, Any]) -> None:
    config = validate(data)
    assert validate(tomllib.loads(dump_config(config))) == config


@pytest.mark.parametrize("path", sorted(ROOT.glob("**/configs/*.toml")), ids=lambda path: path.name)
def test_shipped_configuration_is_valid(path: Path) -> None:
    recipes = pytest.importorskip("learner.recipes").recipe_settings()
    assert load_config(path, recipes=recipes)
