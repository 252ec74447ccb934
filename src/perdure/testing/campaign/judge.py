"""What is true after a run, from the files alone (rules P10 to P12).

The workspace is walked and hashed here; the store is read with Python's own sqlite3; what must be there comes from the
model of the script. The product's word, its image of the workspace, is compared with both and is evidence of nothing.
"""

from __future__ import annotations

import base64
import hashlib
import json
import os
import sqlite3
import stat
from collections import Counter
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

from perdure.testing.campaign.script import DONE, LOOKED, SEEN, Node, Script, Tree, label, tree_after

Row = dict[str, Any]
"""A record's JSON as it stands in the file: the judge takes nobody's word for its types."""


def judge(folder: Path, workspace: Path, steps: Script, *, reference: Tree | None = None) -> Iterator[str]:
    """Everything that is wrong. ``reference``: the workspace of a run that nobody disturbed."""
    found = walk(workspace)
    wanted = tree_after(steps)
    yield from _different("the workspace is not what the script makes", found, wanted)
    if reference is not None:
        yield from _different("the workspace is not that of an undisturbed run", found, reference)
    yield from _counted(workspace, steps)
    yield from _log(folder / "agent.db", steps)
    image = json.loads((folder / "image.json").read_bytes())
    yield from _different("the log's image is not the workspace", _image(image), found)


def walk(workspace: Path) -> Tree:
    """The tree as it is: every name below it, with its mode, and every file with its hash."""
    found: Tree = {}
    root = os.fsencode(workspace)
    for folder, directories, files in os.walk(root):
        for name in directories + files:
            path = os.path.join(folder, name)
            found[os.path.relpath(path, root)] = _node(path)
    return found


def _node(path: bytes) -> Node:
    info = os.lstat(path)
    mode = stat.S_IMODE(info.st_mode)
    if stat.S_ISLNK(info.st_mode):
        return Node("link", target=os.readlink(path))
    if stat.S_ISDIR(info.st_mode):
        return Node("directory", mode)
    with open(path, "rb") as file:
        return Node("file", mode, info.st_size, hashlib.file_digest(file, "sha256").hexdigest())


def _different(what: str, found: Tree, wanted: Tree) -> Iterator[str]:
    for path in sorted(found.keys() | wanted.keys()):
        if found.get(path) != wanted.get(path):
            name = path.decode("utf-8", "backslashreplace")
            yield f"{what}: {name} is {found.get(path) or 'not there'}, must be {wanted.get(path) or 'absent'}"


def _counted(workspace: Path, steps: Script) -> Iterator[str]:
    """Each step's line, exactly once: said apart from the hashes, for whoever reads why a run failed."""
    files = {"bash": "log.txt", "slow": "log.txt", "many": "log.txt", "edit": "ledger.txt", "note": "notes.txt"}
    lines = {name: Counter(_lines(workspace / name)) for name in set(files.values())}
    for step in steps:
        if step.kind in files:
            times = lines[files[step.kind]][f"step {step.number}"]
            if times != 1:
                yield f"step {step.number} ({step.kind}) was applied {times} times"


def _lines(path: Path) -> list[str]:
    return path.read_text().splitlines() if path.exists() else []


def _log(store: Path, steps: Script) -> Iterator[str]:
    with closing(sqlite3.connect(f"file:{store}?mode=ro", uri=True)) as link:
        entries: list[Row] = [json.loads(body) for (body,) in link.execute("SELECT body FROM entries ORDER BY id")]
        tasks: list[Row] = [json.loads(body) for (body,) in link.execute("SELECT body FROM tasks ORDER BY id")]
        submissions: list[Row] = [json.loads(body) for (body,) in link.execute("SELECT body FROM submissions")]
    yield from (f"submission {row['id']} is {row['status']}" for row in submissions if row["status"] != "done")
    yield from (f"{row['kind']} {row['id']} is left" for row in tasks if row["state"]["type"] != "terminal")
    messages: list[Row] = [message for entry in entries for message in entry.get("messages", [])]
    results = [message for message in messages if message["role"] == "tool"]
    order = [message["call_id"] for message in results]
    if order != [*(label(step.number) for step in steps), LOOKED]:
        yield f"the results in the log are {', '.join(order) or 'none'}"
    texts = {message["call_id"]: message for message in results}
    for step in steps:
        message = texts.get(label(step.number))
        if message is None:
            continue
        text = _text(message)
        if message.get("is_error") or message.get("code"):
            yield f"step {step.number} ({step.kind}) ended in an error ({message.get('code')}): {text[:300]}"
        elif step.result is not None and text != step.result:
            yield f"step {step.number} ({step.kind}) answered {text[-300:]!r}, must be {step.result[-300:]!r}"
    said = [_text(message) for message in messages if message["role"] == "assistant"]
    if said.count(DONE) != 1 or said[-1] != SEEN:
        yield f"the agent said {said[-3:]}"


def _text(message: Row) -> str:
    return "".join(part.get("text", "") for part in message["content"])


def _image(image: Row) -> Tree:
    """The product's image of the workspace, in the judge's terms."""
    found: Tree = {}
    for directory, names in image["dirs"].items():
        for name, entry in names.items():
            path = os.path.join(_bytes(directory), _bytes(name))
            found[path] = _entry(entry)
    return found


def _entry(entry: list[Any]) -> Node:
    kind = entry[0]
    if kind == "l":
        return Node("link", target=_bytes(entry[1]))
    return Node("directory", entry[1]) if kind == "d" else Node("file", entry[1], entry[2], entry[3])


def _bytes(name: str) -> bytes:
    return base64.b64decode(name[1:]) if name.startswith("\0") else name.encode()
