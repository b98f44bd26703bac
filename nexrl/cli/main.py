"""`nexrl ...`: the command line. Heavy imports happen inside the command that needs them."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from nexrl import __version__
from nexrl.cli.store import add_store_commands
from nexrl.errors import ConfigError, NexRLError

EXIT_OK, EXIT_FAILED, EXIT_CONFIGURATION, EXIT_INTERRUPTED = 0, 1, 2, 130


def make_parser() -> argparse.ArgumentParser:
    """All commands and flags; the documentation test reads it."""
    parser = argparse.ArgumentParser(
        prog="nexrl", description="Reinforcement learning for language models."
    )
    parser.add_argument("--version", action="version", version=f"nexrl {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    _add_launch(commands)
    _add_plan(commands)
    _add_serve(commands)
    add_store_commands(commands)
    _add_algorithms(commands)
    return parser


def _add_recipe(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "recipe", nargs="?", type=Path, help="recipe folder with rl_train.yaml, or the YAML file"
    )
    parser.add_argument("--job-path", type=Path, help="the recipe folder, by another name")
    parser.add_argument(
        "overrides", nargs="*", metavar="KEY=VALUE", help="settings that override the file's"
    )


def _recipe_of(args: argparse.Namespace) -> tuple[Path, list[str]]:
    """The recipe and the overrides; a KEY=VALUE in the recipe's place is an override."""
    overrides = list(args.overrides)
    recipe: Path | None = args.recipe
    if recipe is not None and "=" in str(recipe) and not recipe.exists():
        overrides.insert(0, str(recipe))
        recipe = None
    if (recipe is None) == (args.job_path is None):
        raise ConfigError("give the recipe folder once: as RECIPE or as --job-path FOLDER")
    return recipe or args.job_path, overrides


def _add_launch(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser("launch", help="run a recipe")
    _add_recipe(parser)
    parser.add_argument(
        "--resume",
        nargs="?",
        const="latest",
        metavar="RUN_FOLDER",
        help="continue a run: its folder, or the newest one of this experiment",
    )
    parser.set_defaults(run=_launch)


def _launch(args: argparse.Namespace) -> int:
    # `--resume` may stand without a value before the recipe or an override.
    if args.resume is not None and not Path(args.resume, "checkpoints").is_dir():
        if "=" in args.resume:
            args.overrides.insert(0, args.resume)
            args.resume = "latest"
        elif args.recipe is None and args.job_path is None:
            args.recipe, args.resume = Path(args.resume), "latest"
    recipe, overrides = _recipe_of(args)
    from nexrl.launch.run import launch

    return launch(recipe, overrides, resume=args.resume)


def _add_plan(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser("plan", help="check a recipe and print what it would do")
    _add_recipe(parser)
    parser.add_argument(
        "--provenance", action="store_true", help="print where each value came from"
    )
    parser.set_defaults(run=_plan)


def _plan(args: argparse.Namespace) -> int:
    recipe, overrides = _recipe_of(args)
    from nexrl.cli.plan import run_plan

    can_run = run_plan(recipe, overrides, provenance=args.provenance)
    return EXIT_OK if can_run else EXIT_CONFIGURATION


def _add_serve(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser("serve", help="run one service by itself")
    parser.add_argument("service", choices=("inference", "train"))
    parser.add_argument("--model", required=True, type=Path, help="Hugging Face model folder")
    parser.add_argument("--host", default="127.0.0.1", help="beyond loopback needs a token")
    parser.add_argument("--port", type=int, default=0, help="0 lets the system choose")
    parser.add_argument("--deterministic", action="store_true", help="same bits for the same seed")
    parser.add_argument(
        "overrides",
        nargs="*",
        metavar="KEY=VALUE",
        help="settings of service.inference_service or service.train_service, without that prefix",
    )
    parser.set_defaults(run=_serve)


def _serve(args: argparse.Namespace) -> int:
    from nexrl.launch.serve import serve_service

    return serve_service(
        args.service,
        model_folder=args.model,
        host=args.host,
        port=args.port,
        deterministic=args.deterministic,
        overrides=args.overrides,
    )


def _add_algorithms(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser("algorithms", help="list algorithms, or show one")
    parser.set_defaults(run=_algorithms, name=None)
    actions = parser.add_subparsers(dest="algorithms_action", metavar="ACTION")
    show = actions.add_parser("show", help="print what a preset sets, its formula and its source")
    show.add_argument("name", metavar="NAME", help="a preset, or an advantage, loss or correction")


def _algorithms(args: argparse.Namespace) -> int:
    from nexrl.cli.algorithms import show_algorithms

    return EXIT_OK if show_algorithms(args.name) else EXIT_CONFIGURATION


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line; a KEY=VALUE may stand anywhere after the command.

    argparse itself gives up on positional arguments that follow an option.
    """
    parser = make_parser()
    args, others = parser.parse_known_args(arguments)
    for text in others:
        if "=" not in text or text.startswith("-") or not hasattr(args, "overrides"):
            hint = "; a setting is written KEY=VALUE" if hasattr(args, "overrides") else ""
            parser.error(f"unrecognized arguments: {text}{hint}")
        args.overrides.append(text)
    return args


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry point; the first cause of a failure is the last thing printed."""
    args = parse(arguments)
    code = _run(args)
    if arguments is None and code == EXIT_INTERRUPTED:
        # We are the program: user code that still blocks in a thread must not hold up its end.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    return code


def _run(args: argparse.Namespace) -> int:
    run: Callable[[argparse.Namespace], int] = args.run
    try:
        return run(args)
    except ConfigError as error:
        print(f"configuration error: {error}", file=sys.stderr)
        return EXIT_CONFIGURATION
    except NexRLError as error:
        print(f"error: {error}", file=sys.stderr)
        return EXIT_FAILED
    except KeyboardInterrupt:  # before a run has its own handler
        print("interrupted", file=sys.stderr)
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        sys.stderr.close()
        return EXIT_FAILED


if __name__ == "__main__":
    sys.exit(main())
