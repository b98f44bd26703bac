"""A recipe's own code, by path: found, imported once, and named with file and line when wrong."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from nexrl.config.user_code import load_user_class, load_user_object
from nexrl.errors import ConfigError

KEY = "rollout_worker.reward"


@pytest.fixture(autouse=True)
def _own_modules() -> Iterator[None]:
    modules, path = set(sys.modules), list(sys.path)
    yield
    sys.path[:] = path
    for name in set(sys.modules) - modules:
        del sys.modules[name]


def write(folder: Path, **files: str) -> Path:
    """Python files by stem; `__` in a name is a folder."""
    for name, text in files.items():
        path = folder / (name.replace("__", "/") + ".py")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return folder


def refused(reference: str, recipe_dir: Path) -> str:
    """The text of the error that loading a reference must raise."""
    with pytest.raises(ConfigError) as caught:
        load_user_object(reference, recipe_dir=recipe_dir, key=KEY)
    return str(caught.value)


def test_a_file_of_the_recipe_comes_before_one_of_the_working_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = write(tmp_path / "recipe", a="def f(): return 'recipe'")
    monkeypatch.chdir(
        write(tmp_path / "here", a="def f(): return 'cwd'", b="def f(): return 'cwd'")
    )
    assert load_user_object("a.py:f", recipe_dir=recipe, key=KEY)() == "recipe"
    assert load_user_object("b.py:f", recipe_dir=recipe, key=KEY)() == "cwd"


def test_a_dotted_module_of_the_recipe_or_of_python(tmp_path: Path) -> None:
    write(tmp_path, work__judge="def f(): return 3")
    assert load_user_object("work.judge:f", recipe_dir=tmp_path, key=KEY)() == 3
    assert load_user_object("math:floor", recipe_dir=tmp_path, key=KEY)(2.5) == 2


def test_one_file_is_one_module_by_whichever_name(tmp_path: Path) -> None:
    write(tmp_path, a="import b\ndef f(): return b.seen", b="seen = []\ndef g(): return seen")
    f = load_user_object("a.py:f", recipe_dir=tmp_path, key=KEY)
    g = load_user_object("b.py:g", recipe_dir=tmp_path, key=KEY)
    again = load_user_object(str(tmp_path / "b.py") + ":g", recipe_dir=tmp_path, key=KEY)
    assert f() is g() is again()


def test_files_of_a_recipe_import_each_other_also_inside_functions(tmp_path: Path) -> None:
    write(
        tmp_path,
        ws__a="from sibling import x\ndef f():\n    import late_sibling\n    return x + late_sibling.y",
        ws__sibling="x = 1",
        ws__late_sibling="y = 2",
    )
    assert load_user_object("ws/a.py:f", recipe_dir=tmp_path, key=KEY)() == 3


def test_recipes_with_files_of_the_same_name_do_not_see_each_others(tmp_path: Path) -> None:
    for name in ("one", "two"):
        write(tmp_path / name, a="from shared import x\ndef f(): return x", shared=f"x = {name!r}")
    results = [
        load_user_object("a.py:f", recipe_dir=tmp_path / name, key=KEY)() for name in ("one", "two")
    ]
    assert results == ["one", "two"]


def test_a_missing_file_lists_the_paths_tried(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    text = refused("gone.py:f", tmp_path / "recipe")
    assert f"{KEY}: there is no file 'gone.py'" in text
    assert str(tmp_path / "recipe" / "gone.py") in text
    assert str(tmp_path / "gone.py") in text


def test_a_missing_module_says_where_it_looked(tmp_path: Path) -> None:
    text = refused("no_such_package.module:f", tmp_path)
    assert "there is no module 'no_such_package.module'" in text
    assert str(tmp_path) in text


def test_a_syntax_error_names_file_and_line(tmp_path: Path) -> None:
    write(tmp_path, a="x = 1\ndef f(:\n    pass\n")
    text = refused("a.py:f", tmp_path)
    assert "syntax error" in text
    assert f"{tmp_path / 'a.py'}:2" in text


def test_an_error_at_import_names_the_line_of_the_user(tmp_path: Path) -> None:
    write(tmp_path, a="import b\ndef f(): ...", b="\n\n1 / 0\n")
    text = refused("a.py:f", tmp_path)
    assert "raised ZeroDivisionError: division by zero" in text
    assert f"{tmp_path / 'b.py'}:3" in text


def test_a_missing_import_of_the_file_is_not_taken_for_a_missing_file(tmp_path: Path) -> None:
    write(tmp_path, a="import no_such_package_at_all", ws__b="import no_such_package_at_all")
    for reference in ("a.py:f", "ws.b:f"):
        assert "raised ModuleNotFoundError: No module named 'no_such_package" in refused(
            reference, tmp_path
        )


def test_a_file_that_exits_does_not_end_the_program(tmp_path: Path) -> None:
    write(tmp_path, a="import sys\nsys.exit(3)\n")
    assert "calls exit(3)" in refused("a.py:f", tmp_path)


def test_a_failed_import_can_be_tried_again_after_the_file_is_mended(tmp_path: Path) -> None:
    write(tmp_path, a="1 / 0")
    refused("a.py:f", tmp_path)
    write(tmp_path, a="def f(): return 'mended'  # longer than before")
    assert load_user_object("a.py:f", recipe_dir=tmp_path, key=KEY)() == "mended"


def test_a_missing_name_suggests_the_nearest_or_lists_what_there_is(tmp_path: Path) -> None:
    write(tmp_path, a="def exact_match(): ...\n")
    assert "has no 'exact_mach'; did you mean exact_match?" in refused("a.py:exact_mach", tmp_path)
    assert "has no 'zzz'; it defines exact_match" in refused("a.py:zzz", tmp_path)


def test_the_wrong_kind_of_thing_is_named(tmp_path: Path) -> None:
    write(tmp_path, a="x = 5\ndef f(): ...\nclass C: ...\n")
    assert "a.py:x is 5 of type int; a function or class is expected" in refused("a.py:x", tmp_path)
    assert load_user_class("a.py", "C", recipe_dir=tmp_path, key=KEY).__name__ == "C"
    with pytest.raises(ConfigError, match=r"f in a\.py is a function; a class is expected"):
        load_user_class("a.py", "f", recipe_dir=tmp_path, key=KEY)


@pytest.mark.parametrize("reference", ["a.py", ":f", "a.py:", "a.py:1x", ""])
def test_a_reference_of_another_shape_is_refused(tmp_path: Path, reference: str) -> None:
    assert "must be `path.py:name` or `package.module:name`" in refused(reference, tmp_path)


def test_dataclasses_of_a_recipe_work(tmp_path: Path) -> None:
    """A module must be in sys.modules while it runs, or dataclasses cannot resolve names."""
    write(
        tmp_path,
        a="from __future__ import annotations\nfrom dataclasses import dataclass\n"
        "@dataclass\nclass C:\n    x: int = 1\n",
    )
    assert load_user_class("a.py", "C", recipe_dir=tmp_path, key=KEY)().x == 1
