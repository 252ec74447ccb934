"""The small project the demo's agent works on, the work it is given, and the model that does it.

The model is a script, a pure function of the request: given the same transcript it says the same thing, and when a call
comes back ``interrupted`` it does what a careful engineer would do: look first, then repeat only what did not happen.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import msgspec

from perdure.harness.messages import Message, ToolResultMessage, UserMessage
from perdure.harness.model import ModelRequest
from perdure.testing.model import Call, Reply, call, calls, fail, say

FILES: dict[str, str] = {
    "stock.py": '''"""What is in the store room, and what has to be bought."""

import csv
from pathlib import Path


def load(path: str = "stock.csv") -> dict[str, tuple[int, int]]:
    """Item -> (how many there are, how many there should be)."""
    with Path(path).open() as file:
        return {row["item"]: (int(row["have"]), int(row["want"])) for row in csv.DictReader(file)}


def missing(stock: dict[str, tuple[int, int]]) -> dict[str, int]:
    """Item -> how many are missing; items that are not missing are left out."""
    return {item: have - want for item, (have, want) in stock.items() if have < want}


if __name__ == "__main__":
    for item, count in missing(load()).items():
        print(f"{item}: {count}")
''',
    "test_stock.py": """import time
import unittest

from stock import missing


class MissingTest(unittest.TestCase):
    def setUp(self) -> None:
        time.sleep(1.2)  # tests take their time

    def test_counts_what_is_missing(self) -> None:
        self.assertEqual(missing({"bolt": (2, 10), "nut": (5, 5)}), {"bolt": 8})


if __name__ == "__main__":
    unittest.main()
""",
    "stock.csv": "item,have,want\nbolt,20,100\nnut,500,500\nwasher,0,250\nhinge,3,8\n",
}

FILE_MODE = 0o640
"""Of these files, before and after."""

SUPPLIER = "supplier"
"""The folder that stands for the outside world: the orders that really went out."""
ORDERS = "orders.jsonl"

TO_ORDER: tuple[tuple[str, int], ...] = (("bolt", 80), ("washer", 250), ("hinge", 5))
"""What has to be ordered once the bug is fixed; nothing else, and each once."""

FIXED = "want - have"
REPORT = "# To order\n\n" + "".join(f"- {item}: {count}\n" for item, count in TO_ORDER)

JOBS: tuple[tuple[str, str], ...] = (
    ("job-1", "Read the project and run its tests."),
    ("job-2", "Fix the bug and show that the tests pass."),
    ("job-3", "Write what has to be ordered into REPORT.md."),
    ("job-4", "Order it all from the supplier."),
    ("job-5", "Say in a few sentences what you did today."),
)
"""Request id and text; each is one run of the agent."""

TESTS = "python3 -B -m unittest -v"

SUMMARY = (
    "The tests showed that missing() had its subtraction the wrong way round, so it counted what was missing as a "
    "negative number. I turned it round, and the tests pass. The list of what has to be ordered is in REPORT.md: "
    "bolts, washers and hinges. All three are ordered, each once, and the supplier's book says the same."
)


@dataclass(frozen=True)
class Step:
    """One thing to do, and how to go on when its call came back interrupted."""

    make: Call
    look_first: Callable[[str], bool] | None = None
    """The effect may have happened: given the supplier's book, whether it did. None: it can simply be repeated."""


def _order(item: str, count: int) -> Step:
    def happened(book: str) -> bool:
        return f'"{item}"' in book

    return Step(call("order", item=item, count=count), happened)


_WORK: dict[str, tuple[Sequence[Step], Reply]] = {
    JOBS[1][1]: (
        (
            Step(call("edit", path="stock.py", edits=[{"old_text": "have - want", "new_text": FIXED}])),
            Step(call("bash", command=TESTS)),
        ),
        say("I turned the subtraction round; the tests pass.", chunk=3),
    ),
    JOBS[2][1]: (
        (
            Step(call("bash", command="python3 -B stock.py")),
            Step(call("write", path="REPORT.md", content=REPORT)),
            Step(call("read", path="REPORT.md")),
        ),
        say("REPORT.md lists bolts, washers and hinges.", chunk=3),
    ),
    JOBS[3][1]: ([_order(item, count) for item, count in TO_ORDER], say("All three are ordered.", chunk=3)),
}


def script(request: ModelRequest) -> Reply:
    """What the model answers."""
    at = max(index for index, message in enumerate(request.messages) if isinstance(message, UserMessage))
    asked = request.messages[at]
    assert isinstance(asked, UserMessage), "the index points at one"
    since = request.messages[at + 1 :]
    if asked.text == JOBS[0][1]:
        return _first_job(since)
    if asked.text == JOBS[4][1]:
        return fail("rate_limit", "too many requests", times=1, retry_after_ms=300, then=say(SUMMARY, chunk=12))
    steps, answer = _WORK[asked.text]
    results = [message for message in since if isinstance(message, ToolResultMessage)]
    for step in steps:
        done, results = _advance(step, results)
        if done is not None:
            return done
    return answer


def _first_job(since: Sequence[Message]) -> Reply:
    results = [message for message in since if isinstance(message, ToolResultMessage)]
    if not results:
        return calls(call("read", path="stock.py"), call("read", path="test_stock.py"), text="I read both files.")
    tests = results[2:]
    if not tests or tests[-1].code == "interrupted":
        return call("bash", command=TESTS)
    return say("One test fails: missing() counts below zero.", chunk=3)


def _advance(step: Step, results: list[ToolResultMessage]) -> tuple[Reply | None, list[ToolResultMessage]]:
    """What this step still needs (None: nothing), and the results that belong to later steps."""
    while results:
        result, results = results[0], results[1:]
        if result.name == "orders":
            assert step.look_first is not None, "the book is read to know whether a step happened"
            if step.look_first(result.text):
                return None, results
            continue  # it never happened: make the call, whose result comes next if it was made
        if result.code != "interrupted":
            return None, results
        if step.look_first is not None and not results:
            return call("orders"), results
    return step.make, results


def orders_in(book: str) -> list[tuple[str, int]]:
    """The supplier's book, parsed."""
    return [(order["item"], order["count"]) for order in map(msgspec.json.decode, book.splitlines())]
