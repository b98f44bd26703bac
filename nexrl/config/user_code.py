"""A recipe's own code, by path: `path.py:name`, `package.module:name`, or a module and a class.

Paths are relative to the recipe folder, then to the working directory. While a file is imported,
its folder and the recipe folder come first on `sys.path`, so files of a recipe import each other;
afterwards they stay at its end, for imports inside functions.

Invariant: one file is one module, however often and by whichever name it is asked for; two recipes
in one process that have files of the same name do not see each other's.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

from nexrl.errors import ConfigError, nearest, user_frame

_lock = threading.RLock()
_modules_of: dict[Path, dict[str, ModuleType]] = {}
"""By folder, the modules that were imported from it, by name."""


def load_user_object(reference: str, *, recipe_dir: Path, key: str) -> Any:
    """The function or class that `path.py:name` or `package.module:name` names.

    `key` is the configuration key that errors speak of. Raises ConfigError.
    """
    module_path, colon, name = reference.rpartition(":")
    if not colon or not module_path or not name.isidentifier():
        raise ConfigError(
            f"{key} must be `path.py:name` or `package.module:name`, got {reference!r}"
        )
    found = _attribute(module_path, name, recipe_dir=recipe_dir, key=key)
    if not callable(found):
        raise ConfigError(f"{key}: {reference} is {_kind(found)}; a function or class is expected")
    return found


def load_user_class(module_path: str, class_name: str, *, recipe_dir: Path, key: str) -> type:
    """The class of a `custom_*_module_path` and `custom_*_class_name` pair.

    `key` is the configuration key of the module path. Raises ConfigError.
    """
    found = _attribute(module_path, class_name, recipe_dir=recipe_dir, key=key)
    if not isinstance(found, type):
        raise ConfigError(
            f"{key}: {class_name} in {module_path} is {_kind(found)}; a class is expected"
        )
    return found


def _attribute(module_path: str, name: str, *, recipe_dir: Path, key: str) -> Any:
    with _lock:
        module = _load_module(module_path, recipe_dir=recipe_dir.resolve(), key=key)
    try:
        return getattr(module, name)
    except AttributeError:
        public = [n for n in vars(module) if not n.startswith("_")]
        defined = [
            n for n in public if getattr(vars(module)[n], "__module__", "") == module.__name__
        ]
        hint = nearest(name, public) or f"; it defines {', '.join(defined) or 'nothing'}"
        raise ConfigError(f"{key}: {module_path} has no {name!r}{hint}") from None


def _load_module(module_path: str, *, recipe_dir: Path, key: str) -> ModuleType:
    if module_path.endswith(".py") or "/" in module_path:
        return _load_file(_find_file(module_path, recipe_dir, key), recipe_dir, key)
    folders = (recipe_dir, Path.cwd())
    with _importable(folders), _explained(f"{key}: importing {module_path}"):
        try:
            return importlib.import_module(module_path)
        except ModuleNotFoundError as error:
            if error.name is None or not f"{module_path}.".startswith(f"{error.name}."):
                raise  # found, but it imports something that is missing
            tried = ", ".join(str(folder) for folder in folders)
            raise ConfigError(
                f"{key}: there is no module {module_path!r}; looked in {tried} and the "
                "installed packages (a file is written with its .py)"
            ) from error


def _find_file(module_path: str, recipe_dir: Path, key: str) -> Path:
    given = Path(module_path if module_path.endswith(".py") else f"{module_path}.py").expanduser()
    tried = list(dict.fromkeys([recipe_dir / given, Path.cwd() / given]))
    for path in tried:
        if path.is_file():
            return path.resolve()
    raise ConfigError(
        f"{key}: there is no file {module_path!r}; tried {', '.join(map(str, tried))}"
    )


def _load_file(path: Path, recipe_dir: Path, key: str) -> ModuleType:
    for modules in _modules_of.values():
        for module in modules.values():
            if module.__file__ and Path(module.__file__) == path:
                return module
    digest = hashlib.blake2b(str(path).encode(), digest_size=4).hexdigest()
    name = f"_nexrl_user_{path.stem}_{digest}"
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise ConfigError(f"{key}: {path} cannot be imported as Python")
    module = importlib.util.module_from_spec(spec)
    with _importable((path.parent, recipe_dir)), _explained(f"{key}: importing {path}"):
        # Under its plain name too, so that a sibling's `import` finds this very module.
        names = {name: module, path.stem: module}
        added = [n for n, m in names.items() if sys.modules.setdefault(n, m) is module]
        try:
            spec.loader.exec_module(module)
        except BaseException:
            for each in added:
                sys.modules.pop(each, None)
            raise
        _modules_of.setdefault(path.parent, {}).update(dict.fromkeys(added, module))
    return module


@contextmanager
def _importable(folders: Sequence[Path]) -> Iterator[None]:
    """Make folders importable, first on the path; record what is imported from them."""
    _hide_foreign(folders)
    before = set(sys.modules)
    saved = list(sys.path)
    sys.path[:0] = [str(folder) for folder in folders]
    importlib.invalidate_caches()
    try:
        yield
    finally:
        sys.path[:] = saved
        sys.path += [str(f) for f in dict.fromkeys(folders) if str(f) not in saved]
        for name in set(sys.modules) - before:
            _record(name, sys.modules[name], folders)


def _hide_foreign(folders: Sequence[Path]) -> None:
    """Take modules of other recipes out of the way where these folders have the same name."""
    for folder, modules in _modules_of.items():
        if folder in folders:
            continue
        for name in modules:
            top = name.partition(".")[0]
            if any((f / top).is_dir() or (f / f"{top}.py").is_file() for f in folders):
                sys.modules.pop(name, None)
    for folder in folders:
        sys.modules.update(_modules_of.get(folder, {}))


def _record(name: str, module: ModuleType, folders: Sequence[Path]) -> None:
    """Remember a module as its folder's, if it was found there by its top name; packages that are
    merely installed below a folder (a virtual environment) are not the recipe's."""
    top = name.partition(".")[0]
    file = getattr(module, "__file__", None)
    places = [Path(p) for p in ([file] if file else getattr(module, "__path__", []))]
    if top == "nexrl":
        return
    for folder in folders:
        roots = (folder / top, folder / f"{top}.py")
        if any(place.is_relative_to(root) for place in places for root in roots):
            _modules_of.setdefault(folder, {})[name] = module
            return


@contextmanager
def _explained(what: str) -> Iterator[None]:
    """Any failure of user code at import as a ConfigError with file and line."""
    try:
        yield
    except ConfigError:
        raise
    except SyntaxError as error:
        raise ConfigError(
            f"{what}: syntax error: {error.msg} ({error.filename}:{error.lineno})"
        ) from error
    except Exception as error:
        raise ConfigError(
            f"{what} raised {type(error).__name__}: {error} ({user_frame(error)})"
        ) from error
    except SystemExit as error:
        raise ConfigError(f"{what} calls exit({error.code!r}) ({user_frame(error)})") from error


def _kind(value: Any) -> str:
    if callable(value):
        return "a function"
    return f"{value!r:.40} of type {type(value).__name__}"
