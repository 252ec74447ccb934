"""The scripted work of a campaign, and a model of it: what the workspace must be, byte for byte (rules P9, P12).

A step is one call of a tool. Each leaves its line exactly once in a file that only grows (``log.txt`` by commands,
``ledger.txt`` by edits, ``notes.txt`` by file requests), so that a step applied twice, or half, or not at all, shows in
the bytes. The model is plain Python on a dict; nothing of the package computes it.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Final, Literal, TypeAlias

from perdure.harness.messages import ToolResultMessage, UserMessage
from perdure.harness.model import ModelRequest
from perdure.kernel.json import JsonValue
from perdure.testing.model import Call, Reply, call, calls, say

Kind: TypeAlias = Literal["write", "edit", "bash", "slow", "many", "note", "read"]

CALLS: Final = 10
"""Steps of a run."""
VARIANTS: Final = 12
"""Different scripts there are; a run's is its seed modulo this."""
JOB: Final = "Do the work."
DONE: Final = "All of it is done."
LOOK: Final = "Is it all there?"
"""What is asked at the end, when nothing is attacked any more: it makes a Space that was lost after its last call."""
SEEN: Final = "It is."
LOOKED: Final = "look"
"""What the model calls the call for that."""
RUN_VARIABLE: Final = "PERDURE_CAMPAIGN_RUN"
"""In the environment of everything that lives in the Space of a run: its folder."""
MANY_DONE: Final = "many {step} done"
NOTE_DONE: Final = "note {step} done"


@dataclass(frozen=True, slots=True)
class Node:
    """What a name in a tree is: a file (with the SHA-256 of its bytes), a link or a directory."""

    kind: Literal["file", "link", "directory"]
    mode: int = 0
    size: int = 0
    sha256: str = ""
    target: bytes = b""


Tree: TypeAlias = dict[bytes, Node]
"""By path relative to the workspace."""


class Model:
    """A workspace as it has to become."""

    def __init__(self) -> None:
        self.files: dict[bytes, tuple[int, bytes]] = {}
        self.links: dict[bytes, bytes] = {}
        self.directories: dict[bytes, int] = {}

    def write(self, path: bytes, data: bytes) -> None:
        mode = self.files[path][0] if path in self.files else 0o644
        self.files[path] = (mode, data)

    def append(self, path: bytes, data: bytes) -> None:
        self.write(path, self.files.get(path, (0, b""))[1] + data)

    def remove(self, path: bytes) -> None:
        """It and all below it."""
        for kept in (self.files, self.links, self.directories):
            for found in [name for name in kept if name == path or name.startswith(path + b"/")]:
                del kept[found]

    def tree(self) -> Tree:
        made: Tree = {path: Node("directory", mode) for path, mode in self.directories.items()}
        made.update({path: Node("link", target=target) for path, target in self.links.items()})
        for path, (mode, data) in self.files.items():
            made[path] = Node("file", mode, len(data), hashlib.sha256(data).hexdigest())
        return made


@dataclass(frozen=True, slots=True)
class Step:
    number: int
    """From 1 on."""
    kind: Kind
    call: Call
    apply: Callable[[Model], None]
    result: str | None = None
    """The text of its result; None: only that it is no error."""

    @property
    def gated(self) -> bool:
        """Whether it waits, in the middle of what it does, for the runner to let it go on."""
        return self.kind in ("slow", "many")

    @property
    def adoptable(self) -> bool:
        return self.kind in ("bash", "slow")


Script: TypeAlias = tuple[Step, ...]


def script_of(variant: int) -> Script:
    """The same steps for the same number."""
    chance = random.Random(f"script {variant % VARIANTS}")  # noqa: S311  # reproducible is what it is for
    kinds: list[Kind] = ["edit", "bash", "slow", "many", "note", "read", "slow", "many"]
    kinds[chance.randrange(5, 8)] = chance.choice(("write", "bash", "edit"))
    chance.shuffle(kinds)
    kinds = ["write", *kinds, "bash"]
    assert len(kinds) == CALLS, "a run is as long as it says"
    return tuple(_step(number, kind, chance) for number, kind in enumerate(kinds, 1))


def one_call(kind: Kind) -> Script:
    """The steps around one of a kind, for attacks on a single call: what it needs, it, and one that follows."""
    chance = random.Random(0)  # noqa: S311
    kinds: tuple[Kind, ...] = ("write", kind, "bash")
    return tuple(_step(number, kind, chance) for number, kind in enumerate(kinds, 1))


def tree_after(steps: Script) -> Tree:
    model = Model()
    for step in steps:
        step.apply(model)
    return model.tree()


def label(number: int) -> str:
    """What the model calls the call of a step."""
    return f"step-{number}"


def number_of(label: str) -> int:
    """The step of a call; 0 if it is none of the script."""
    head, _, tail = label.partition("-")
    return int(tail) if head == "step" and tail.isdigit() else 0


def answers(steps: Script, *, together: bool) -> Callable[[ModelRequest], Reply]:
    """What the model says: the steps in order, one or, ``together``, two calls an answer. Of the request alone."""
    size = 2 if together else 1

    def answer(request: ModelRequest) -> Reply:
        asked = [message.text for message in request.messages if isinstance(message, UserMessage)]
        if asked[-1] == LOOK:
            seen = isinstance(request.messages[-1], ToolResultMessage)
            return say(SEEN) if seen else replace(call("read", path="ledger.txt"), id=LOOKED)
        done = sum(isinstance(message, ToolResultMessage) for message in request.messages)
        if done >= len(steps):
            return say(DONE)
        return calls(*(replace(step.call, id=label(step.number)) for step in steps[done : done + size]))

    return answer


# --- the kinds of steps -----------------------------------------------------------------------------------------


def _step(number: int, kind: Kind, chance: random.Random) -> Step:
    return _MAKERS[kind](number, chance)


def _write(number: int, chance: random.Random) -> Step:
    """The first one makes the ledger, later ones a file of their own."""
    path = "ledger.txt" if number == 1 else f"files/written-{number}.txt"
    lines = "" if number == 1 else "".join(f"step {number} line {n}\n" for n in range(chance.randint(1, 400)))
    content = f"begin\n{lines}end\n"

    def apply(model: Model) -> None:
        if number != 1:
            model.directories.setdefault(b"files", 0o755)
        model.write(path.encode(), content.encode())

    return Step(number, "write", call("write", path=path, content=content), apply)


def _edit(number: int, chance: random.Random) -> Step:
    """Made twice, the line would be there twice."""
    new = f"step {number}\nend\n"

    def apply(model: Model) -> None:
        data = model.files[b"ledger.txt"][1]
        model.write(b"ledger.txt", data.replace(b"end\n", new.encode(), 1))

    edit: JsonValue = {"old_text": "end\n", "new_text": new}
    return Step(number, "edit", call("edit", path="ledger.txt", edits=[edit]), apply)


def _bash(number: int, chance: random.Random) -> Step:
    """A command that is over at once, with changes of every kind."""
    words, change = chance.choice(_CHANGES)

    def apply(model: Model) -> None:
        model.append(b"log.txt", f"step {number}\n".encode())
        change(model, str(number).encode())

    command = f"echo 'step {number}' >> log.txt; {words.replace('N', str(number))}; echo 'did {number}'"
    return Step(number, "bash", call("bash", command=command), apply, f"did {number}\n")


def _slow(number: int, chance: random.Random) -> Step:
    """A command that has done half of it when it waits, and says much meanwhile."""
    said = chance.choice((1, 200))

    def apply(model: Model) -> None:
        model.append(b"log.txt", f"step {number} begins\nstep {number}\n".encode())

    command = (
        f"echo 'step {number} begins' >> log.txt; for i in $(seq {said}); do echo \"said $i\"; done; "
        f"{wait_for_gate(number)}; echo 'step {number}' >> log.txt; echo 'did {number}'"
    )
    text = "".join(f"said {n}\n" for n in range(1, said + 1)) + f"did {number}\n"
    return Step(number, "slow", call("bash", command=command), apply, text)


def _many(number: int, chance: random.Random) -> Step:
    """Three commands and a file request: nothing of it can be adopted."""

    def apply(model: Model) -> None:
        model.append(b"log.txt", f"step {number} begins\nstep {number} goes on\nstep {number}\n".encode())
        model.write(f"many-{number}.txt".encode(), f"many {number}\n".encode())

    return Step(number, "many", call("many", step=number), apply, MANY_DONE.format(step=number))


def _note(number: int, chance: random.Random) -> Step:
    """File requests only, of which the second half undoes what the first half needed."""

    def apply(model: Model) -> None:
        model.append(b"notes.txt", f"step {number}\n".encode())

    return Step(number, "note", call("note", step=number), apply, NOTE_DONE.format(step=number))


def _read(number: int, chance: random.Random) -> Step:
    return Step(number, "read", call("read", path="ledger.txt"), lambda model: None)


def wait_for_gate(number: int) -> str:
    """Shell words that wait until the runner has opened the gate of a step, and not for ever."""
    gate = f'"${RUN_VARIABLE}/gates/{number}"'
    return f"i=0; while [ ! -e {gate} ] && [ $i -lt 3000 ]; do sleep 0.02; i=$((i+1)); done"


def _big(model: Model, number: bytes) -> None:
    model.write(b"big-" + number, b"x" * 2_500_000)


def _tree(model: Model, number: bytes) -> None:
    top = b"tree-" + number
    model.directories[top] = 0o750
    model.directories[top + b"/empty"] = 0o755
    model.links[top + b"/link"] = b"../log.txt"
    model.write(top + b"/odd\xff name", number + b"\n")


def _mode(model: Model, number: bytes) -> None:
    path = b"run-" + number
    model.write(path, b"#!/bin/sh\n")
    model.files[path] = (0o755, model.files[path][1])


def _replace(model: Model, number: bytes) -> None:
    for path in [path for path in model.files if path.startswith(b"many-")]:
        model.remove(path)
    model.write(b"replaced-" + number, b"all of many is gone\n")


def _leftover(model: Model, number: bytes) -> None:
    """It leaves a process running, which changes nothing."""


_CHANGES: Final[tuple[tuple[str, Callable[[Model, bytes], None]], ...]] = (
    ("head -c 2500000 /dev/zero | tr '\\0' x > big-N", _big),
    (
        "mkdir -m 750 tree-N; mkdir tree-N/empty; ln -s ../log.txt tree-N/link; "
        "echo N > \"tree-N/$(printf 'odd\\377 name')\"",
        _tree,
    ),
    ("echo '#!/bin/sh' > run-N; chmod 755 run-N", _mode),
    ("rm -f many-*; echo 'all of many is gone' > replaced-N", _replace),
    ("setsid sleep 300 > /dev/null 2>&1 & :", _leftover),
)

_MAKERS: Final[dict[Kind, Callable[[int, random.Random], Step]]] = {
    "write": _write,
    "edit": _edit,
    "bash": _bash,
    "slow": _slow,
    "many": _many,
    "note": _note,
    "read": _read,
}
