"""The same search gives the same answer in a Space and in a directory of this machine (rules H362 to H365)."""

from __future__ import annotations

import os
import random
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from space_kit import Daemon, advanced, daemon

from perdure.harness.environment import ExecutionEnvironment, FileError
from perdure.spaces.client import SpaceClient
from perdure.spaces.environment import SpaceEnvironment
from perdure.tools import looking
from perdure.tools.local import LocalEnvironment

NAMES = ["a", "b.py", "c.txt", "build", "a b", ".hidden", ".git", ".gitignore", "\udcff", "x\ny", "é", "\U0001f600"]
CONTENTS = [b"needle\n", b"one\nneedle two\nthree\n", b"", b"needle\0", b"*.py\n!b.py\n", b"build/\n", b"\xff needle"]


@pytest.fixture
async def made() -> AsyncIterator[Daemon]:
    async with daemon() as made:
        yield made


@pytest.fixture
async def client(made: Daemon) -> AsyncIterator[SpaceClient]:
    async with advanced(made) as client:
        yield client


def grow(root: Path, chance: random.Random) -> None:
    for _ in range(chance.randint(0, 12)):
        parts = [chance.choice(NAMES) for _ in range(chance.randint(1, 3))]
        place = root.joinpath(*parts)
        try:
            place.parent.mkdir(parents=True, exist_ok=True)
            if chance.random() < 0.15:
                place.symlink_to(chance.choice(["..", "a", "/etc/passwd", "nowhere"]))
            else:
                with open(place, "xb") as file:
                    file.write(chance.choice(CONTENTS))
        except OSError:
            continue


async def answer(env: ExecutionEnvironment, what: str, options: dict[str, Any]) -> object:
    try:
        if what == "list":
            return await env.list_dir(options["path"], limit=options["limit"])
        return await (env.find(**options) if what == "find" else env.grep(**options))
    except FileError as error:
        return type(error)


@pytest.mark.parametrize("seed", range(4))
async def test_a_space_and_a_directory_answer_alike_h362(client: SpaceClient, made: Daemon, seed: int) -> None:
    chance = random.Random(seed)
    here, there = LocalEnvironment(made.workspace), SpaceEnvironment(client, call=0, attempt=0, nonce="")
    for round in range(4):
        root = made.workspace / f"tree {round}"
        root.mkdir()
        grow(root, chance)
        for _ in range(4):
            below = chance.choice(["", "/a", "/a/..", "/build/.", "/b.py", "/none"])
            path = chance.choice([f"tree {round}", str(root)]) + below
            common = {"path": path, "ignored": chance.random() < 0.5, "limit": chance.choice([1, 3, 100])}
            options = {
                "list": common,
                "find": {**common, "pattern": chance.choice([None, "*", "**/*.py", "a/**"]),
                         "kind": chance.choice([None, "file"])},
                "grep": {**common, "pattern": chance.choice(["needle", "^n", "E{2}", "("]), "ignore_case": True,
                         "context": chance.choice([0, 1]), "glob": chance.choice([None, "*.py", "[ab]*"])},
            }  # fmt: skip
            for what, given in options.items():
                assert await answer(there, what, given) == await answer(here, what, given), (what, given)


async def test_the_tools_show_the_same_in_both_h178(client: SpaceClient, made: Daemon) -> None:
    (made.workspace / "src").mkdir()
    (made.workspace / "src" / os.fsdecode(b"\xff.py")).write_text("one\nneedle\n")
    here, there = LocalEnvironment(made.workspace), SpaceEnvironment(client, call=0, attempt=0, nonce="")
    for env in (here, there):
        assert (await looking.ls(env, "src")).text == r"$'\xff.py'  11"
        assert (await looking.find(env, ".", kind="file")).text == r"$'src/\xff.py'"
        assert (await looking.grep(env, "needle", context=1)).text == (
            "$'src/\\xff.py'-1-one\n$'src/\\xff.py':2:needle"
        )
