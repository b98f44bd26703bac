"""The model folder of a run: a path from the configuration, or made once by the recipe's factory.

A factory `path.py:name` is called as `factory(folder, seed)` and writes a Hugging Face model folder.
The result is kept under `<run_root>/.models/<key>` and appears there only when complete. The key
covers the seed and the source files of the factory and of what its module imports by name, outside
installed packages: a changed factory never meets an old folder.
"""

from __future__ import annotations

import contextlib
import hashlib
import inspect
import os
import sysconfig
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from nexrl.config.schema import RunConfig
from nexrl.config.user_code import load_user_object
from nexrl.errors import ConfigError, UserCodeError, user_frame

_KEY = "service.train_service.model_factory"


def cached_folder(config: RunConfig, *, recipe_dir: Path) -> Path:
    """Where the factory's folder is, or will be."""
    reference = config.service.train_service.model_factory
    if reference is None:
        raise ConfigError(f"{_KEY} is null, and so is service.train_service.model_path")
    factory = load_user_object(reference, recipe_dir=recipe_dir, key=_KEY)
    digest = hashlib.blake2b(
        f"{reference.rpartition(':')[2]} {config.seed}".encode(), digest_size=8
    )
    for source in _sources(inspect.unwrap(factory)):
        digest.update(source.read_bytes())
    return Path(config.launch.run_root) / ".models" / digest.hexdigest()


def _sources(factory: Callable[..., Any]) -> list[Path]:
    """The factory's own file, then the files of what stands in its module, installed ones aside."""
    module = inspect.getmodule(factory)
    found: dict[Path, None] = {}
    for value in (factory, *vars(module).values()):
        if inspect.isfunction(value) or inspect.isclass(value) or inspect.ismodule(value):
            with contextlib.suppress(TypeError, OSError):
                path = Path(inspect.getsourcefile(value) or "").resolve()
                if path.is_file() and not path.is_relative_to(sysconfig.get_path("stdlib")):
                    found[path] = None
    installed = Path(sysconfig.get_path("purelib"))
    return [path for path in found if not path.is_relative_to(installed)]


def resolve_model_folder(config: RunConfig, *, recipe_dir: Path) -> Path:
    """The folder with config.json, weights and tokenizer; makes it when a factory is given."""
    service = config.service.train_service
    if service.model_path is not None:
        candidates = [Path(service.model_path), recipe_dir / service.model_path]
        for folder in candidates:
            if (folder / "config.json").is_file():
                return folder.resolve()
        raise ConfigError(
            f"service.train_service.model_path: no config.json in {' or '.join(map(str, candidates))}"
        )
    target = cached_folder(config, recipe_dir=recipe_dir)
    if not (target / "config.json").is_file():
        _make(config, target, recipe_dir=recipe_dir)
    return target.resolve()


def _make(config: RunConfig, target: Path, *, recipe_dir: Path) -> None:
    reference = config.service.train_service.model_factory
    assert reference, "`cached_folder` has refused"
    factory = load_user_object(reference, recipe_dir=recipe_dir, key=_KEY)
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f"{target.name}-", dir=target.parent) as draft:
        try:
            factory(Path(draft), config.seed)
        except Exception as error:
            raise UserCodeError(
                f"{_KEY}: {reference} raised {type(error).__name__}: {error} ({user_frame(error)})"
            ) from error
        if not (Path(draft) / "config.json").is_file():
            raise UserCodeError(
                f"{_KEY}: {reference} wrote no config.json into the folder it was given"
            )
        if not target.exists():
            os.replace(draft, target)
