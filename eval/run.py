"""
`python -m modeling_looped.eval`: lm-eval's command with this package's tasks and its model `looped`, which is the
default. All of lm-eval's arguments are there, and two more:

    --data-dir DIR          a folder with local JSONL files of the tasks, repeatable; instead of the Hub
    --recurrences 1,2,4..8  one evaluation for each number of passes, of one loaded model and the same requests

With --output_path every item's scores are kept, as for `looped eval-report`.
"""

import argparse
import difflib
import json
import os
import re
import sys
from collections.abc import Iterator, Sequence
from importlib.resources import files

from lm_eval import evaluator
from lm_eval._cli import HarnessCLI
from lm_eval.api.registry import get_model
from lm_eval.config.evaluate_config import EvaluatorConfig
from lm_eval.loggers import EvaluationTracker, TrackioLogger, WandbLogger
from lm_eval.tasks import TaskManager
from lm_eval.utils import handle_non_serializable, make_table, setup_logging

from looped_cli import ends_in_a_sentence

from . import harness  # noqa: F401  makes the model known
from .held_out import parse_recurrences


TASKS = str(files("modeling_looped.eval") / "tasks")


def main(arguments: Sequence[str] | None = None) -> None:
    """The command. Errors end in a sentence and the status of `looped`'s."""
    ours = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    ours.add_argument("--data-dir", "--data_dir", action="append", default=[], dest="data_dir")
    ours.add_argument("--recurrences")
    asked, rest = ours.parse_known_args(sys.argv[1:] if arguments is None else list(arguments))
    if not rest or rest[0] in ("-h", "--help"):
        print(__doc__)
    setup_logging()
    args = _lm_eval_arguments(rest)
    with ends_in_a_sentence("modeling_looped.eval"):
        if args.command != "run":
            if hasattr(args, "include_path"):
                args.include_path = _include(args.include_path)
            HarnessCLI().execute(args)
            return
        counts = None if asked.recurrences is None else parse_recurrences(asked.recurrences)
        run(args, asked.data_dir, counts, sys.argv[1:] if arguments is None else list(arguments))


def run(
    args: argparse.Namespace,
    data_dirs: Sequence[str] = (),
    counts: Sequence[int] | None = None,
    arguments: Sequence[str] = (),
) -> list[dict]:
    """
    lm-eval's `run` with its parsed `args`. Returns the results at each of `counts`, with local files of
    `data_dirs`; `[None]` on other ranks than 0. They
    record how the command was called with `arguments`.
    """
    args.model = args.model or ("looped" if args.config is None else None)
    config = EvaluatorConfig.from_cli(args)
    if counts is not None and config.model != "looped":
        raise ValueError(
            f"--recurrences is for --model looped, and this is {config.model!r}: write num_recurrences in --model_args."
        )
    if counts is not None and config.use_cache is not None:
        raise ValueError("--use_cache does not tell recurrence counts apart: leave it out with --recurrences.")
    for folder in data_dirs:
        if not os.path.isdir(folder):
            raise ValueError(f"--data-dir {folder!r} is not a folder.")
    if data_dirs:
        config.metadata["data_dir"] = os.pathsep.join(data_dirs)
    config.log_samples = config.log_samples or bool(config.output_path)
    names, manager = find_tasks(config.tasks, _include(config.include_path), config.metadata)
    loaded = manager.load(names)
    members = {child for group in loaded["groups"].values() for child in group.child_names}
    tasks = [one for kind in ("groups", "tasks") for name, one in loaded[kind].items() if name not in members]
    options = {"batch_size": config.batch_size, "max_batch_size": config.max_batch_size, "device": config.device}
    model = get_model(config.model).create_from_arg_obj(config.model_args, options)
    if counts is not None:
        for count in counts:  # all of them, before any work
            model.num_recurrences = count
    done = []
    for results, tracker in _evaluations(model, config, tasks, manager, counts):
        done.append(results)
        if results is not None:
            if arguments:
                results["config"]["command"] = recorded_command(arguments)
            _keep(results, tracker, config)
    return done


def recorded_command(arguments: Sequence[str]) -> list[str]:
    """
    How to call the command again, without this machine's folders: the model is `CHECKPOINT`, the output `reproduced`,
    and local data is called by its last name.
    """

    def changed(option: str | None, value: str) -> str:
        if option in ("--output_path", "-o"):
            return "reproduced"
        if option in ("--model_args", "-a"):
            return re.sub(r"(^|,)(pretrained|model)=[^,]*", r"\1\2=CHECKPOINT", value)
        if option in ("--data-dir", "--data_dir", "--include_path", "--config", "-C"):
            return os.path.basename(value.rstrip(os.sep))
        return value

    words, option = [], None
    for word in arguments:
        if word.startswith("-"):
            option, equals, value = word.partition("=")
            words.append(f"{option}={changed(option, value)}" if equals else word)
        else:
            words.append(changed(option, word))
    return ["python", "-m", "modeling_looped.eval", *words]


def find_tasks(asked: Sequence[str] | str, include: list[str], metadata: dict) -> tuple[list[str], TaskManager]:
    """
    The names that `asked` stands for (names, and patterns such as `looped_axis_*`), and a manager that has them: of the
    folders in `include`, with `metadata` for their configurations.
    lm-eval's own tasks, whose index takes it some twenty seconds, are looked at only where others do not have all.

    Raises:
        `ValueError`: for a name that no task has, with those that are near.
    """
    asked = asked.split(",") if isinstance(asked, str) else [name for one in asked for name in one.split(",")]
    for defaults in (False, True):
        manager = TaskManager(include_path=include, include_defaults=defaults, metadata=metadata)
        found = {name: [name] if name.endswith(".yaml") else manager.match_tasks([name]) for name in asked}
        if all(found.values()):
            return list(dict.fromkeys(name for names in found.values() for name in names)), manager
    missing = next(name for name, names in found.items() if not names)
    near = difflib.get_close_matches(missing, manager.all_tasks, n=3)
    hint = f"Did you mean {' or '.join(near)}? " if near else ""
    raise ValueError(f"--tasks: {missing!r} is no task. {hint}`python -m modeling_looped.eval ls tasks` lists them.")


def _evaluations(
    model, config: EvaluatorConfig, tasks: list, manager: TaskManager, counts: Sequence[int] | None
) -> Iterator[tuple[dict | None, EvaluationTracker]]:
    """Results at each of `counts`, or as the model is. The requests are built once, and the machine looked at once."""
    shared = {
        "limit": config.limit,
        "samples": config.samples,
        "cache_requests": config.cache_requests.get("cache_requests", False),
        "rewrite_requests_cache": config.cache_requests.get("rewrite_requests_cache", False),
        "write_out": config.write_out,
        "log_samples": config.log_samples,
        "system_instruction": config.system_instruction,
        "apply_chat_template": config.apply_chat_template,
        "fewshot_as_multiturn": config.fewshot_as_multiturn,
        "confirm_run_unsafe_code": config.confirm_run_unsafe_code,
    }
    seeds = config.seed or [None] * 4
    first = None
    for count in [None] if counts is None else counts:
        model_args = dict(config.model_args)
        if count is not None:
            model.num_recurrences = model_args["num_recurrences"] = count
        where = {"output_path": config.output_path} if config.output_path else {}
        tracker = EvaluationTracker(**{**config.hf_hub_log_args, **where})
        if first is None:
            results = first = evaluator.simple_evaluate(
                model=model,
                model_args=model_args,
                tasks=tasks,
                num_fewshot=config.num_fewshot,
                batch_size=config.batch_size,
                max_batch_size=config.max_batch_size,
                device=config.device,
                use_cache=config.use_cache,
                delete_requests_cache=config.cache_requests.get("delete_requests_cache", False),
                check_integrity=config.check_integrity,
                evaluation_tracker=tracker,
                gen_kwargs=config.gen_kwargs,
                task_manager=manager,
                predict_only=config.predict_only,
                metadata=config.metadata,
                **dict(zip(("random_seed", "numpy_random_seed", "torch_random_seed", "fewshot_random_seed"), seeds)),
                **shared,
            )
            tracker_of_first = tracker.general_config_tracker
        else:
            results = evaluator.evaluate(model, manager.load(tasks), **shared)
            vars(tracker.general_config_tracker).update(
                {
                    name: value
                    for name, value in vars(tracker_of_first).items()
                    if name not in ("start_time", "end_time")
                }
            )
            if results is not None:
                results = {**first, **results, "config": {**first["config"], **model.get_model_info()}}
                results["config"]["model_args"] = model_args
        if results is not None:
            results["config"]["model"] = config.model
        yield results, tracker


def _keep(results: dict, tracker: EvaluationTracker, config: EvaluatorConfig) -> None:
    """What lm-eval's own command does with results."""
    samples = results.pop("samples", None) if config.log_samples else None
    if config.show_config:
        print(json.dumps(results, indent=2, default=handle_non_serializable, ensure_ascii=False))
    loggers = [WandbLogger(config.wandb_args, config.wandb_config_args)] if config.wandb_args else []
    loggers += [TrackioLogger(config.trackio_args)] if config.trackio_args else []
    for logger in loggers:
        logger.post_init(results)
        logger.log_eval_result()
        if samples is not None:
            logger.log_eval_samples(samples)
    tracker.save_results_aggregated(results=results, samples=samples)
    for name in results["configs"] if samples is not None else ():
        tracker.save_results_samples(task_name=name, samples=samples[name])
    if tracker.push_results_to_hub or tracker.push_samples_to_hub:
        tracker.recreate_metadata_card()
    shown = {name: value for name, value in results["config"]["model_args"].items() if name != "trust_remote_code"}
    print(
        f"{config.model} ({shown}), gen_kwargs: ({config.gen_kwargs}), limit: {config.limit}, "
        f"num_fewshot: {config.num_fewshot}, batch_size: {config.batch_size}"
    )
    print(make_table(results))
    if "groups" in results:
        print(make_table(results, "groups"))


def _lm_eval_arguments(rest: Sequence[str]) -> argparse.Namespace:
    """As lm-eval parses them, which it does from `sys.argv` only."""
    kept = sys.argv
    sys.argv = ["lm_eval", *rest]
    try:
        return HarnessCLI().parse_args()
    finally:
        sys.argv = kept


def _include(more: str | list | None) -> list[str]:
    return [TASKS, *([more] if isinstance(more, str) else more or [])]
