"""The public face: what it names, and that naming it costs little."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

import perdure
from perdure import spaces

LAZY = [perdure, spaces]


@pytest.mark.parametrize("package", LAZY)
def test_every_public_name_resolves(package: ModuleType) -> None:
    for name in package.__all__:
        assert getattr(package, name) is not None
    with pytest.raises(AttributeError, match="nonsense"):
        package.nonsense  # noqa: B018


@pytest.mark.parametrize("package", LAZY)
def test_type_checkers_and_run_time_see_the_same_names(package: ModuleType) -> None:
    assert package.__file__ is not None
    tree = ast.parse(Path(package.__file__).read_text())
    block = next(node for node in tree.body if isinstance(node, ast.If))
    imports = [node for node in block.body if isinstance(node, ast.ImportFrom)]
    seen = {alias.asname: node.module for node in imports for alias in node.names}
    assert seen == package._MODULE_OF


def test_all_names_are_imported_without_the_extras() -> None:
    """K235: the one that needs an extra is left out, and says so when it is asked for."""
    code = """
from importlib.machinery import PathFinder

class Bare(PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        return None if name.startswith("psycopg") else super().find_spec(name, path, target)

import importlib.machinery, sys
importlib.machinery.PathFinder = sys.meta_path[sys.meta_path.index(PathFinder)] = Bare
from perdure import *
print("SqliteStorage" in globals(), "PostgresStorage" in globals())
try:
    from perdure import PostgresStorage
except ImportError as error:
    print(error)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    first, _, rest = done.stdout.partition("\n")
    assert (first, "perdure[postgres]" in rest) == ("True False", True), done.stderr


@pytest.mark.parametrize("package", LAZY)
def test_importing_the_package_loads_nothing_heavy(package: ModuleType) -> None:
    heavy = ("pydantic", "typer", "rich", "apsw", "msgspec", "asyncio")
    code = f"import sys, {package.__name__}; print([m for m in {heavy!r} if m in sys.modules])"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert out.strip() == "[]"


def test_opening_an_agent_without_tools_loads_no_pydantic() -> None:
    code = "import sys, perdure; perdure.Harness, perdure.SqliteStorage; print('pydantic' in sys.modules)"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert out.strip() == "False"
