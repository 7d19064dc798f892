"""The plan's numbers are worked out by hand, its warnings come when they should, and nothing is started."""

from __future__ import annotations

import json
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from common.algorithm_config import sees_staleness
from common.config import RunConfig
from common.config_load import load_config, valid_keys, validate
from common.errors import ConfigError, DataError, ModelError, ResourceError
from deploy.estimates import Machine, ModelFacts, count_gpus, estimate, kv_tokens, model_facts
from deploy.placement import resolve_auto
from deploy.plan import make_plan, total_memory, warnings
from deploy.unused import RULES, settings_without_effect
from learner.models import TINY_SORT
from learner.recipes import RECIPES, recipe_settings
from learner.smollm2 import FOLDER_NAME

ROOT = Path(__file__).resolve().parent.parent
GIB = 2**30


def machine(**changes: Any) -> Machine:
    return Machine(**{"num_cpus": 8, "num_gpus": 0, "memory": 64 * GIB, "folder_free": 8 * GIB, **changes})


# embedding 10 x 4; a layer: attention 4 x 4 x 2 + 2 x (2 x 4) = 48, feed-forward 3 x (8 x 4) = 96, norm 4; final norm 4
SHAPES: dict[str, tuple[int, ...]] = {
    "model.embed_tokens.weight": (10, 4),
    **{
        f"model.layers.{layer}.{name}.weight": shape
        for layer in (0, 1)
        for name, shape in {
            "self_attn.q_proj": (4, 4),
            "self_attn.k_proj": (2, 4),
            "self_attn.v_proj": (2, 4),
            "self_attn.o_proj": (4, 4),
            "mlp.gate_proj": (8, 4),
            "mlp.up_proj": (8, 4),
            "mlp.down_proj": (4, 8),
            "input_layernorm": (4,),
        }.items()
    },
    "model.norm.weight": (4,),
    "lm_head.weight": (10, 4),
}
TINY = ModelFacts(name="tiny", shapes=SHAPES, num_layers=2, hidden_size=4, vocab_size=10, kv_width=4)


def save_model(folder: Path) -> Path:
    """Config and header of `TINY`, with no values behind them."""
    folder.mkdir()
    (folder / "config.json").write_text(
        json.dumps(
            {
                "num_hidden_layers": 2,
                "hidden_size": 4,
                "num_attention_heads": 2,
                "num_key_value_heads": 1,
                "vocab_size": 10,
            }
        )
    )
    header = {name: {"dtype": "F32", "shape": list(shape), "data_offsets": [0, 0]} for name, shape in SHAPES.items()}
    text = json.dumps(header).encode()
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(text)) + text)
    (folder / "tokenizer.json").touch()
    return folder


def resolved(**settings: Any) -> RunConfig:
    return resolve_auto(validate(settings), 0)


# Sizes


def test_parameters_are_counted_from_shapes() -> None:
    assert TINY.num_parameters == 40 + 2 * 148 + 4 + 40
    assert TINY.num_trained(None) == 380
    assert TINY.num_trained(1) == 148
    assert TINY.num_trained(2) == 296


def test_value_model_has_no_head_of_the_policy_and_may_keep_attention() -> None:
    assert TINY.value_model(freeze_attention=False) == (40 + 2 * 148 + 4 + 5, 40 + 2 * 148 + 4 + 5)
    assert TINY.value_model(freeze_attention=True) == (345, 2 * 100 + 4 + 5)


def test_model_folder_is_read_without_its_values(tmp_path: Path) -> None:
    facts = model_facts(str(save_model(tmp_path / "model")))
    assert facts.num_parameters == 380
    assert (facts.num_layers, facts.hidden_size, facts.vocab_size, facts.kv_width) == (2, 4, 10, 4)


def test_models_that_are_made_have_the_sizes_they_will_have(tmp_path: Path) -> None:
    assert model_facts("builtin:tiny-sort", tmp_path).num_parameters == 329_088
    (tmp_path / FOLDER_NAME).mkdir()
    assert model_facts("package:smollm2", tmp_path).num_parameters == 134_515_008
    assert "made once" in model_facts("builtin:tiny-sort", tmp_path).note


def test_model_whose_package_is_missing_is_refused_with_the_remedy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ModelError, match="run `make smollm2`"):
        model_facts("package:smollm2", tmp_path)


@pytest.mark.parametrize(
    ("name", "content", "has"),
    [
        (None, "", False),
        ("chat_template.jinja", "{{ messages }}", True),
        ("tokenizer_config.json", '{"chat_template": "{{ messages }}"}', True),
        ("tokenizer_config.json", '{"chat_template": null}', False),
    ],
)
def test_chat_template_of_a_folder_is_found_by_its_files(
    tmp_path: Path, name: str | None, content: str, has: bool
) -> None:
    folder = save_model(tmp_path / "model")
    if name:
        (folder / name).write_text(content)
    assert model_facts(str(folder)).has_chat_template == has


def test_model_that_cannot_be_used_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="no such folder"):
        model_facts(str(tmp_path / "absent"))
    folder = save_model(tmp_path / "model")
    (folder / "config.json").write_text('{"vocab_size": 10}')
    with pytest.raises(ModelError, match=r"config\.json lacks what a plan needs"):
        model_facts(str(folder))


def test_learner_memory_is_weights_gradients_and_moments() -> None:
    config = resolved(learner={"trainable_layers": 1, "logprob_chunk_tokens": 100, "micro_batch_tokens": 200})
    memory = estimate(config, TINY)
    assert memory.learner["policy weights"] == 4 * 380
    assert memory.learner["policy gradients and AdamW"] == 12 * 148
    assert memory.learner["logits"] == 3 * 4 * 100 * 10
    assert memory.learner["value model with gradients and AdamW"] == 4 * 345 + 12 * 209


def test_recipe_without_value_model_needs_no_memory_for_one() -> None:
    config = resolved(algorithm={"value": "policy_head"})
    assert "value model with gradients and AdamW" not in estimate(config, TINY).learner


def test_engine_and_publication_memory_follow_the_served_precision() -> None:
    half = estimate(resolved(model={"dtype": "bfloat16"}), TINY)
    assert half.engine["weights"] == 2 * 380
    assert half.engine["KV cache"] == 128 * 2**20
    assert half.publications == 3 * 2 * 380


def test_buffer_memory_is_the_admission_limit_of_longest_trajectories() -> None:
    config = resolved(buffer={"batch_size": 8}, staleness={"bound": 1}, rollout={"max_tokens": 100})
    assert estimate(config, TINY).buffer == 16 * (100 * 13 + 1024)


def test_kv_cache_holds_keys_and_values_of_every_layer() -> None:
    assert kv_tokens(resolved(engine={"kv_cache_mib": 16}), TINY) == 16 * 2**20 // (4 * 2 * 4)


def test_total_counts_each_actor_and_leaves_gpu_memory_out() -> None:
    config = resolved(rollout={"num_actors": 3})
    memory = estimate(config, TINY)
    others = total_memory(config, memory) - sum(memory.learner.values()) - 3 * sum(memory.engine.values())
    assert others == 1000 * 2**20 + memory.buffer + memory.publications
    on_gpu = resolve_auto(validate({"rollout": {"num_actors": 1}}), 2)
    memory = estimate(on_gpu, TINY)
    assert total_memory(on_gpu, memory) == 1000 * 2**20 + memory.buffer + memory.publications
    assert "KV cache" not in memory.engine


@pytest.mark.parametrize(("visible", "count"), [("", 0), ("-1", 0), ("0,1", 0)])
def test_hidden_gpus_are_not_counted(monkeypatch: pytest.MonkeyPatch, visible: str, count: int) -> None:
    monkeypatch.setattr(Path, "glob", lambda self, pattern: iter([]))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert count_gpus() == count


def test_gpus_are_counted_by_their_device_files(monkeypatch: pytest.MonkeyPatch) -> None:
    devices = [Path(f"/dev/nvidia{name}") for name in ("0", "1", "2", "ctl", "-uvm")]
    monkeypatch.setattr(Path, "glob", lambda self, pattern: iter(devices))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert count_gpus() == 3
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1,2")
    assert count_gpus() == 2


# Warnings


def found(config: RunConfig, *, model: ModelFacts = TINY, **changes: Any) -> list[str]:
    return warnings(config, model, estimate(config, model), machine(**changes))


def test_sound_run_has_no_warnings() -> None:
    assert found(resolved()) == []


LONG = {"rollout": {"max_tokens": 2**18}, "buffer": {"max_mib": 2000}}


@pytest.mark.parametrize(
    ("settings", "changes", "says"),
    [
        ({}, {"memory": GIB}, "of memory are needed and 1 GiB are free"),
        ({}, {"folder_free": 100}, "has 100 B free and publications take 4.45 KiB"),
        ({}, {"folder_free": None}, "does not exist: make it"),
        (LONG, {}, "the KV cache holds 16 trajectories of the greatest length, for 32 slots"),
        ({**LONG, "rollout": {"max_tokens": 2**20}, "engine": {"kv_cache_mib": 16}}, {}, "less than one trajectory of"),
        ({"rollout": {"slots": 200}}, {}, "80 of 400 generation slots can never be used"),
        ({"rollout": {"max_new_tokens": 65}}, {}, "its response is cut short"),
        (
            {"learner": {"micro_batch_tokens": 127}},
            {},
            "micro_batch_tokens = 127 is less than rollout.max_tokens = 128",
        ),
        ({"learner": {"trainable_layers": 3}}, {}, "and the model has 2 layers: the run will fail"),
        ({"rollout": {"num_actors": 3}}, {"num_cpus": 2}, "the services ask Ray for 2.1 CPUs and there are 2"),
    ],
)
def test_what_will_not_work_is_said(settings: dict[str, Any], changes: dict[str, Any], says: str) -> None:
    lines = found(resolved(**settings), **changes)
    assert any(says in line for line in lines), lines


@pytest.mark.parametrize(
    ("settings", "key"),
    [
        ({"algorithm": {"trust_region": "none", "eps_low": 0.1}, "staleness": {"bound": 0}}, "algorithm.eps_low = 0.1"),
        ({"groups": {"close_at": 3}}, "groups.close_at = 3"),
        ({"algorithm": {"dual_clip": 3.0}}, "algorithm.dual_clip = 3.0"),
        ({"algorithm": {"correction_high": 3.0}}, "algorithm.correction_high = 3.0"),
        ({"algorithm": {"kl_estimator": "k2"}}, "algorithm.kl_estimator = 'k2'"),
        ({"algorithm": {"nll_above": 0.1}}, "algorithm.nll_above = 0.1"),
        ({"algorithm": {"bounds": "probability", "trust_region": "soft_gate"}}, "algorithm.bounds = 'probability'"),
        ({"algorithm": {"eps_high_stale": 0.3}}, "algorithm.eps_high_stale = 0.3"),
        ({"algorithm": {"history": 3}}, "algorithm.history = 3"),
        (
            {"algorithm": {"reject_stale_sequences": True}, "staleness": {"bound": 0}},
            "algorithm.reject_stale_sequences = True",
        ),
        ({"staleness": {"bound": 0, "on_exceeded": "drop"}}, "staleness.on_exceeded = 'drop'"),
        ({"engine": {"gpu_memory_utilization": 0.5}}, "engine.gpu_memory_utilization = 0.5"),
        ({"algorithm": {"policy_lambda": 0.5, "lambda_alpha": 2.0}}, "algorithm.lambda_alpha = 2.0"),
        (
            {"algorithm": {"value": "policy_head"}, "value": {"freeze_attention": False}},
            "value.freeze_attention = False",
        ),
        ({"evaluation": {"num_prompts": 0, "every_updates": 3}}, "evaluation.every_updates = 3"),
        ({"data": {"options": {"x": 1}}}, "data.options = {'x': 1}"),
        ({"data": {"source": "rows.jsonl", "num_rows": 9}}, "data.num_rows = 9"),
    ],
)
def test_changed_setting_without_effect_is_named(settings: dict[str, Any], key: str) -> None:
    assert any(line.startswith(f"{key} has no effect: ") for line in settings_without_effect(resolved(**settings)))


@pytest.mark.parametrize("recipe", RECIPES)
def test_recipes_set_nothing_without_effect(recipe: str) -> None:
    words = [f"recipe={recipe}"]
    if not sees_staleness(load_config(None, words, recipes=recipe_settings()).algorithm):
        words.append("staleness.bound=0")
    config = resolve_auto(load_config(None, words, recipes=recipe_settings()), 0)
    assert settings_without_effect(config) == []


@pytest.mark.parametrize(
    ("words", "warned"),
    [
        (["recipe=grpo"], True),
        (["recipe=grpo", "algorithm.trust_region=mask"], True),
        (["recipe=grpo", "staleness.bound=0"], False),
        (["recipe=grpo", "algorithm.reference=behaviour"], False),
        (["recipe=grpo-dis"], False),
        (["recipe=ppo"], True),
        (["recipe=tis"], False),
        (["recipe=m2po"], False),
        (["recipe=a-star-po"], False),
    ],
)
def test_stale_tokens_that_nothing_corrects_are_warned_of(words: list[str], warned: bool) -> None:
    """F-14: the ratio to the recomputed policy is 1 by construction."""
    lines = settings_without_effect(resolve_auto(load_config(None, words, recipes=recipe_settings()), 0))
    assert len(lines) == warned
    for line in lines:
        assert "without any correction" in line
        assert "4 versions stale" in line
        assert "grpo-dis" in line


def test_rules_name_real_settings() -> None:
    keys = set(valid_keys()) | {key.partition(".")[0] for key in valid_keys()}
    assert {prefix for prefix, _, _ in RULES} <= keys


# The text


def test_plan_of_the_quick_start_says_it_all(tmp_path: Path) -> None:
    config = load_config(ROOT / "deploy/configs/quickstart.toml", recipes=recipe_settings())
    text = make_plan(config, machine())
    for expected in (
        "sao: Single rollouts",
        "329,088 parameters, 2 layers",
        "mask: tokens whose ratio leaves the band have no gradient (0.7 to 6)",
        "at most 4 weight versions",
        "task:sort-digits: 2,000 prompts to train on",
        "100 updates take 6,400 prompts, 3.2 epochs",
        "64 trajectories, single rollouts",
        "at most 1,024, in 1 micro-batch\n",
        "at most (4 + 1) · 64 = 320 trajectories",
        "at most 2 × 32 = 64 of them",
        "on 8 CPUs and no GPU",
        "2, each 0.5 CPU, in-process engine, 1 scoring process each",
        "No warnings.",
        "Nothing was started",
    ):
        assert expected in text, expected


@pytest.mark.parametrize("recipe", RECIPES)
def test_every_recipe_can_be_planned(recipe: str) -> None:
    text = make_plan(load_config(None, [f"recipe={recipe}"], recipes=recipe_settings()), machine())
    assert RECIPES[recipe].summary in text
    if recipe.startswith("grpo"):
        assert "8 groups of 8" in text


def test_plan_on_gpus_places_services_on_them() -> None:
    text = make_plan(RunConfig(), machine(num_gpus=3))
    assert "2, each 1 CPU and 1 GPU, async engine" in text
    assert "through shared memory" in text
    assert "the KV cache takes the rest of 85% of each GPU" in text


@pytest.mark.parametrize(
    ("settings", "error", "says"),
    [
        ({"data": {"source": "task:nope"}}, ConfigError, "nope"),
        ({"data": {"source": "absent.jsonl"}}, DataError, "absent.jsonl"),
        ({"reward": {"function": "nowhere:score"}}, ConfigError, "reward.function = 'nowhere:score'"),
        ({"environment": {"name": "nowhere:World"}}, ConfigError, "environment.name = 'nowhere:World'"),
        ({"model": {"path": "absent"}}, ModelError, "model.path = 'absent'"),
        ({"data": {"chat": "always"}}, ConfigError, 'data.chat = "always" needs a chat template'),
        ({"engine": {"device": "cuda"}}, ResourceError, "need 2 GPUs, and there are 0"),
    ],
)
def test_what_a_run_would_fail_on_fails_the_plan(settings: dict[str, Any], error: type[Exception], says: str) -> None:
    with pytest.raises(error) as caught:
        make_plan(validate(settings), machine())
    assert says in str(caught.value)


def test_plan_says_what_became_of_every_row(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(f'{{"prompt": "p{i % 50}"}}\n' for i in range(150)) + "{}\n")
    data = {"source": str(path), "on_bad_row": "skip"}
    text = make_plan(
        validate({"data": data, "evaluation": {"num_prompts": 7}, "model": {"path": TINY_SORT}}), machine()
    )
    left_out = "14 left out because their prompts are held out already, 1 skipped as malformed"
    assert f"129 prompts to train on, 7 held out, {left_out}\n" in text


def test_configs_that_come_along_set_nothing_without_effect() -> None:
    for path in (ROOT / "deploy/configs").glob("*.toml"):
        config = resolve_auto(load_config(path, recipes=recipe_settings()), 0)
        assert settings_without_effect(config) == [], path


def test_planning_loads_nothing_heavy() -> None:
    code = "import sys; from deploy.plan import make_plan; from common.config import RunConfig; make_plan(RunConfig())"
    code += "; print(*sorted({'torch', 'ray', 'vllm', 'transformers'} & set(sys.modules)))"
    result = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert result.stdout.strip() == "", result.stderr
    assert result.returncode == 0, result.stderr


@pytest.mark.parametrize(
    ("transport", "num_gpus", "said"),
    [("nccl", 0, "needs GPUs"), ("ipc", 3, "on one device"), ("nccl", 3, "the learner cannot send yet")],
)
def test_a_transport_that_cannot_work_is_refused_at_the_start(transport: str, num_gpus: int, said: str) -> None:
    config = RunConfig.model_validate({"weights": {"transport": transport}})
    with pytest.raises(ConfigError, match=said):
        resolve_auto(config, num_gpus)
