"""The command `slipstream`. Every command imports what it needs when it runs, so that `--help` is quick."""

from __future__ import annotations

import argparse
import os
import sys
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from common.config_load import annotation_of, load_config, parse_override, put, validate
from common.errors import ConfigError, SlipstreamError

if TYPE_CHECKING:
    from common.config import RunConfig
    from deploy.run_dir import RunDir

INTERNAL_ERROR, INTERRUPTED, BROKEN_PIPE = 70, 130, 141  # exit statuses beside those of common/errors.py
HELP_WIDTH = 120
CONFIGS = Path(__file__).resolve().parent / "configs"

# What may change when a run is resumed: how long and where it runs, not what it learns.
CHANGEABLE = (
    "max_updates", "data.epochs", "import_dir", "rollout.num_actors", "rollout.slots", "engine", "reward.processes",
    "reward.time_limit_s", "evaluation.every_updates", "checkpoint", "weights", "metrics", "supervision", "ray",
    "learner.micro_batch_tokens", "learner.logprob_chunk_tokens", "learner.num_threads", "buffer.max_mib",
)  # fmt: skip

DESCRIPTION = """\
Asynchronous reinforcement-learning post-training for language models: rollout actors generate with vLLM and never wait
for the learner, the learner trains on what has arrived.
"""
EXAMPLES = """\
examples:
  slipstream doctor                                  is everything here that a run needs?
  slipstream train --config quickstart               train a small built-in model, in minutes, on two CPU cores
  slipstream train --config my.toml max_updates=500  your own settings; one of them changed for this run
  slipstream train --config my.toml --dry-run        what would run where, how much memory, what looks wrong
  slipstream rollouts runs/20260801-120000-sao --worst
  slipstream resume runs/20260801-120000-sao

`slipstream COMMAND --help` says more about each. Exit status: 0 done, 1 the run failed, 2 the settings, the data or the
model are wrong, 70 a defect of slipstream, 128 + n stopped by signal n.
"""
SETTINGS = """\
settings:
  A setting comes from, in rising order of precedence: its default, the recipe, the file given with --config, and words
  of the form TABLE.KEY=VALUE on the command line. The value is TOML, or plain text. `none` unsets what may be unset.
  The file has the same names:

      recipe = "grpo-dis"
      [rollout]
      num_actors = 4              # the same as rollout.num_actors=4 on the command line

  `slipstream config` explains every setting, `slipstream config staleness rollout.slots` some of them.
"""
TRAIN = f"""\
examples:
  slipstream train --config quickstart
  slipstream train --config my.toml recipe=grpo staleness.bound=0 run_dir=runs/synchronous
  slipstream train data.source=sums.jsonl reward.function=rewards:score model.path=./Qwen3-0.6B

{SETTINGS}
Configs that come along: {{configs}}.
Ctrl-C or SIGTERM saves a checkpoint and ends the run; a second one ends it at once.
"""
RESUME = """\
The run goes on from its newest complete checkpoint with the settings it was started with. These may be changed:
  {changeable}

example:
  slipstream resume runs/20260801-120000-sao max_updates=300
"""
ROLLOUTS = """\
examples:
  slipstream rollouts RUN_DIR                         the last five trajectories that came to an end
  slipstream rollouts RUN_DIR --worst --last 20       those with the least reward
  slipstream rollouts RUN_DIR --outcome dropped       also: trained, dropped_stale, dropped_unscorable, …
  slipstream rollouts RUN_DIR --json --last 1000 | jq .response

Reads the archive of a run, while it goes on too (the newest trajectories follow within some seconds). What the model
sampled is in colour, or between ⟦ and ⟧ where there is none.
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; returns the exit status. An error that a user can act on is one line on standard error."""
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")  # a terminal without our characters must not end a run
    try:
        command, arguments = _parse(argv)
        return command(arguments)
    except SlipstreamError as error:
        print(f"slipstream: error: {' '.join(str(error).split())}", file=sys.stderr)
        return error.exit_status
    except KeyboardInterrupt:
        print("slipstream: interrupted", file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:  # the reader of our output went away, as `head` does
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return BROKEN_PIPE
    except Exception:
        traceback.print_exc()
        print("slipstream: internal error: this is a defect; the lines above say where", file=sys.stderr)
        return INTERNAL_ERROR


# Commands


def train(arguments: argparse.Namespace) -> int:
    config = _config(arguments.config, arguments.settings)
    if arguments.dry_run:
        from deploy.plan import make_plan

        print(make_plan(config))
        return 0
    from deploy.run_dir import RunDir, new_run_dir

    if arguments.or_resume and config.run_dir:
        present = RunDir(Path(config.run_dir).expanduser())
        if present.holds_run and _is_complete(present, config):
            print(f"nothing to do: the run in {present.path} is complete", file=sys.stderr)
            return 0
        if present.holds_run:
            # A job that is started again says what it said before: of that, what may change counts.
            return _go_on(present, [word for word in arguments.settings if _may_change(parse_override(word)[0])])
    run_dir, config = new_run_dir(config)
    return _run(run_dir, config)


def resume(arguments: argparse.Namespace) -> int:
    from deploy.run_dir import RunDir

    return _go_on(RunDir(arguments.run_dir), arguments.settings)


def recipes(arguments: argparse.Namespace) -> int:
    from rich.console import Console

    from common.config_load import nearest
    from deploy.settings_help import toml_of
    from learner.recipes import RECIPES

    console = Console(highlight=False, soft_wrap=True)
    for name in arguments.names:
        if name not in RECIPES:
            raise ConfigError(f"recipe {name!r} is unknown{nearest(name, RECIPES)}; `slipstream recipes` lists all")
    for name in arguments.names or RECIPES:
        recipe = RECIPES[name]
        console.print(f"[bold]{recipe.name}[/bold]\n  {recipe.summary}\n  Source: {recipe.source}")
        if arguments.names:
            console.print(
                "".join(f"\n  {key} = {toml_of(value)}" for key, value in recipe.settings.items()), markup=False
            )
    if not arguments.names:
        console.print("\n`slipstream recipes NAME` shows the settings of one; choose it by recipe=NAME.", markup=False)
    return 0


def config(arguments: argparse.Namespace) -> int:
    from deploy.settings_help import describe_settings

    print(describe_settings(arguments.names))
    return 0


def doctor(arguments: argparse.Namespace) -> int:
    from rich.console import Console

    from deploy.doctor import examine

    failures = examine(Console(highlight=False, soft_wrap=True), quick=arguments.quick)
    return 1 if failures else 0


def rollouts(arguments: argparse.Namespace) -> int:
    from rich.console import Console

    from deploy.rollouts import Query, show
    from deploy.run_dir import RunDir

    query = Query(
        count=arguments.last,
        order=arguments.order,
        version=arguments.version,
        outcome=arguments.outcome,
        prompt=arguments.prompt,
    )
    show(RunDir(arguments.run_dir), query, Console(highlight=False, soft_wrap=True), as_json=arguments.json)
    return 0


def report(arguments: argparse.Namespace) -> int:
    from deploy.report import write_report
    from deploy.run_dir import RunDir

    run_dir = RunDir(arguments.run_dir)
    run_dir.config()  # refuses what is no run
    print(write_report(run_dir.path))
    return 0


def _go_on(run_dir: RunDir, changes: Sequence[str]) -> int:
    settings = run_dir.config().model_dump()
    for word in changes:
        key, value = parse_override(word)
        if not _may_change(key):
            raise ConfigError(f"{key} cannot be changed in a run that has begun; what can be: {', '.join(CHANGEABLE)}")
        put(settings, key, value)
    config = validate(settings)
    if _is_complete(run_dir, config):
        raise ConfigError(
            f"the run in {run_dir.path} has made its {config.max_updates} updates: raise max_updates to go on with it, "
            f"or read it with `slipstream report {run_dir.path}`"
        )
    return _run(run_dir, config)


def _may_change(key: str) -> bool:
    return any(key == name or key.startswith(f"{name}.") for name in CHANGEABLE)


def _run(run_dir: RunDir, config: RunConfig) -> int:
    with run_dir.lock():
        run_dir.write_config(config)
        print(f"run directory: {run_dir.path}", file=sys.stderr)
        print("loading Ray, some seconds", file=sys.stderr, flush=True)
        from deploy.launch import train

        try:
            summary = train(config, run_dir)
        except SlipstreamError:
            print(f"logs of every service: {run_dir.logs}", file=sys.stderr)
            if run_dir.saved_updates():
                print(f"to go on from the newest checkpoint: slipstream resume {run_dir.path}", file=sys.stderr)
            raise
    print(summary)
    return summary.exit_status


def _is_complete(run_dir: RunDir, config: RunConfig) -> bool:
    """By what is saved: updates that were made and not saved are to be made again."""
    return run_dir.saved_updates() >= config.max_updates


# Arguments


def _config(path: str | None, words: Sequence[str]) -> RunConfig:
    from learner.recipes import recipe_settings

    return load_config(find_config(path) if path else None, words, recipes=recipe_settings())


def find_config(name: str) -> Path:
    """A file by its path, or one that comes along by its name."""
    own = CONFIGS / f"{name}.toml"
    return own if not Path(name).exists() and own.exists() else Path(name)


def _parse(argv: Sequence[str] | None) -> tuple[Callable[[argparse.Namespace], int], argparse.Namespace]:
    parser = make_parser()
    arguments, rest = parser.parse_known_args(argv)
    if not hasattr(arguments, "command"):
        parser.print_help()
        raise SystemExit(2)
    settings = getattr(arguments, "settings", None)
    for word in rest:  # argparse gives up on key=value words that come after an option
        key = word.lstrip("-").partition("=")[0]
        if settings is not None and "=" in word and not word.startswith("-"):
            settings.append(word)
        elif settings is not None and annotation_of(key) is not None:
            parser.error(f"settings are written without dashes: {word.lstrip('-')}{'' if '=' in word else '=VALUE'}")
        else:
            parser.error(f"unrecognized argument: {word}; see slipstream {arguments.name} --help")
    command: Callable[[argparse.Namespace], int] = arguments.command
    return command, arguments


def make_parser() -> argparse.ArgumentParser:
    """The whole command line."""
    parser = argparse.ArgumentParser(
        prog="slipstream",
        description=DESCRIPTION,
        epilog=EXAMPLES,
        formatter_class=_Help,
        allow_abbrev=False,
    )
    parser.add_argument("--version", action=_Version)
    commands = parser.add_subparsers(title="commands", metavar="COMMAND")

    def add(command: Callable[[argparse.Namespace], int], help: str, epilog: str = "") -> argparse.ArgumentParser:
        name = command.__name__
        sub = commands.add_parser(
            name,
            help=help,
            description=help[0].upper() + help[1:] + ".",
            epilog=epilog,
            formatter_class=_Help,
            allow_abbrev=False,
        )
        sub.set_defaults(command=command, name=name)
        return sub

    configs = ", ".join(sorted(path.stem for path in CONFIGS.glob("*.toml")))
    sub = add(train, "train a model", TRAIN.format(configs=configs))
    sub.add_argument("--config", metavar="FILE", help="TOML file, or the name of one that comes along")
    sub.add_argument("--dry-run", action="store_true", help="say what would be done, and start nothing")
    sub.add_argument(
        "--or-resume", action="store_true", help="go on with run_dir if it holds a run; for jobs that restart"
    )
    sub.add_argument("settings", nargs="*", metavar="KEY=VALUE", help="settings that go before those of the file")

    changeable = ", ".join(CHANGEABLE).replace(", reward", ",\n  reward", 1).replace(", learner", ",\n  learner", 1)
    sub = add(resume, "go on with a run that was stopped or failed", RESUME.format(changeable=changeable))
    sub.add_argument("run_dir", type=Path, metavar="RUN_DIR", help="directory of the run")
    sub.add_argument("settings", nargs="*", metavar="KEY=VALUE", help="settings to change")

    sub = add(recipes, "list the algorithms")
    sub.add_argument("names", nargs="*", metavar="NAME", help="show the settings of these")

    sub = add(config, "explain every setting: kind, default, meaning", SETTINGS.replace("settings:", "in short:", 1))
    sub.add_argument(
        "names", nargs="*", metavar="NAME", help="only these tables or keys, such as rollout or groups.size"
    )

    sub = add(doctor, "check whether this machine has what a run needs")
    sub.add_argument("--quick", action="store_true", help="without trying to import torch, Ray and vLLM")

    _add_rollouts(add(rollouts, "show what the model wrote", ROLLOUTS))

    sub = add(report, "write report.html of a run, at any time")
    sub.add_argument("run_dir", type=Path, metavar="RUN_DIR", help="directory of the run")
    return parser


def _add_rollouts(sub: argparse.ArgumentParser) -> None:
    sub.add_argument("run_dir", type=Path, metavar="RUN_DIR", help="directory of the run")
    sub.add_argument("--last", type=_positive, default=5, metavar="N", help="how many to show (5)")
    order = sub.add_mutually_exclusive_group()
    order.add_argument("--worst", dest="order", action="store_const", const="worst", help="by reward, least first")
    order.add_argument("--best", dest="order", action="store_const", const="best", help="by reward, greatest first")
    sub.set_defaults(order="newest")
    sub.add_argument("--version", type=int, metavar="V", help="with a token sampled under weight version V")
    sub.add_argument("--outcome", metavar="NAME", help="with this outcome")
    sub.add_argument("--prompt", metavar="ID", help="of this prompt")
    sub.add_argument("--json", action="store_true", help="one JSON object a line")


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text} is less than 1")
    return number


class _Help(argparse.RawDescriptionHelpFormatter):
    """Usage and options as wide as the texts around them, whatever the terminal."""

    def __init__(self, prog: str) -> None:
        super().__init__(prog, width=HELP_WIDTH)


class _Version(argparse.Action):
    """Prints the installed version; looked up only when asked for."""

    def __init__(self, option_strings: Sequence[str], dest: str) -> None:
        super().__init__(option_strings, dest, nargs=0, help="print the version")

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        from importlib.metadata import PackageNotFoundError, version

        try:
            print(f"slipstream {version('slipstream-rl')}")
        except PackageNotFoundError:
            print("slipstream, not installed")
        parser.exit()


if __name__ == "__main__":
    sys.exit(main())
