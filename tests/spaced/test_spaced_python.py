"""The file goes where any Python 3.9 is."""

from __future__ import annotations

import ast
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from spaced_wire import Space

from perdure.spaced import SPACED, spaced

ROOT = Path(__file__).parent.parent.parent


def test_it_is_python_3_9_and_the_standard_library() -> None:
    """Rule S1."""
    tree = ast.parse(SPACED.read_text(encoding="utf-8"), feature_version=(3, 9))
    names = {
        name.split(".")[0]
        for node in ast.walk(tree)
        for name in (
            [alias.name for alias in node.names]
            if isinstance(node, ast.Import)
            else [node.module or "."]
            if isinstance(node, ast.ImportFrom)
            else []
        )
    }
    assert names - set(sys.stdlib_module_names) == set()
    assert not any(isinstance(node, ast.Match) for node in ast.walk(tree))


def pythons() -> list[str]:
    found = {shutil.which(f"python3.{minor}") for minor in range(9, 15)}
    found |= {str(path) for path in Path(os.path.expanduser("~/.pyenv/versions")).glob("3.*/bin/python3")}
    return sorted(path for path in found if path)


def version(python: str) -> tuple[int, ...]:
    words = "import sys; print(*sys.version_info[:2])"
    process = subprocess.run([python, "-c", words], capture_output=True, timeout=30)
    return tuple(int(part) for part in process.stdout.split()) if process.returncode == 0 else (0, 0)


def test_it_runs_on_the_oldest_and_the_newest_python_there_is(make_space: Callable[..., Space]) -> None:
    """Rule S1."""
    there = sorted((version(python), python) for python in pythons())
    there = [(found, python) for found, python in there if found >= (3, 9)]
    if not there:
        pytest.skip("no other Python is installed here")
    for number, (found, python) in enumerate((there[0], there[-1])):
        space = make_space(name=f"space{number}", python=python).up()
        driver = space.driver(1)
        driver.advance()
        driver.settle_first()
        assert driver.hello["python"].startswith(".".join(map(str, found)) + ".")
        assert driver.run("echo x > f; sleep 1000 &")["left"] == 1
        assert driver.ask("scan", freeze=True, sync=True)["total"] == 1
        driver.restore(1, None, {}, floor={"call": 1, "attempt": 2})
        assert space.files() == {}


def test_the_protocol_page_names_every_op_every_code_and_every_crash_point() -> None:
    page = (ROOT / "docs" / "spaced-protocol.md").read_text(encoding="utf-8")
    source = SPACED.read_text(encoding="utf-8")
    ops = {*spaced._OPEN_OPS, *spaced._TEST_OPS, *spaced._OPS}
    assert [op for op in sorted(ops) if f"`{op} " not in page and f"`{op}`" not in page] == []
    assert [point for point in spaced.POINTS if f"`{point}`" not in page] == []
    codes = set(re.findall(r'Fail\(\s*"([a-z_]+)"', source))
    assert [code for code in sorted(codes) if f"`{code}`" not in page] == []
    used = set(re.findall(r'point\("([a-z_.]+)"\)', source)) | {"advance.cut"}
    assert used == set(spaced.POINTS)
