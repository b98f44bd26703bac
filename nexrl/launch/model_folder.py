"""The model folder of a run: a path from the configuration, or made once by the recipe's factory.

A factory `path.py:name` is called as `factory(folder, seed)` and writes a Hugging Face model folder.
The result is kept under `<run_root>/.models/<key>`, keyed by the factory's source and the seed, and
appears there only when complete.
"""

from __future__ import annotations

import hashlib
import inspect
import os
import shutil
import tempfile
from pathlib import Path

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
    source = Path(inspect.getsourcefile(inspect.unwrap(factory)) or "").read_bytes()
    digest = hashlib.blake2b(digest_size=8)
    for part in (reference.rpartition(":")[2].encode(), source, str(config.seed).encode()):
        digest.update(part)
    return Path(config.launch.run_root) / ".models" / digest.hexdigest()


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
    reference = config.service.train_service.model_factory or ""
    factory = load_user_object(reference, recipe_dir=recipe_dir, key=_KEY)
    target.parent.mkdir(parents=True, exist_ok=True)
    draft = Path(tempfile.mkdtemp(prefix=f"{target.name}-", dir=target.parent))
    try:
        try:
            factory(draft, config.seed)
        except Exception as error:
            raise UserCodeError(
                f"{_KEY}: {reference} raised {type(error).__name__}: {error} ({user_frame(error)})"
            ) from error
        if not (draft / "config.json").is_file():
            raise UserCodeError(
                f"{_KEY}: {reference} wrote no config.json into the folder it was given"
            )
        if not target.exists():
            os.replace(draft, target)
    finally:
        shutil.rmtree(draft, ignore_errors=True)
