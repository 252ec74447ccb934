"""examples/payments: the agent, or the bank, gets SIGKILL before, while and after a charge is made; each account is
charged once, and no call ends interrupted (rules H93 and H94)."""

from __future__ import annotations

import asyncio
import json
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from perdure.harness.documents import TOOL_RESULT
from perdure.harness.messages import ToolResultMessage, decode_messages
from perdure.storage.sqlite import SqliteStorage
from perdure.testing.normal import read_records

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "payments"
KILLED = ROOT / "tests" / "docs" / "killed.py"
DYING = Path(__file__).with_name("dying_bank.py")
DUE = {"ada": 90, "bob": 20, "eve": 5}
MOST_COMMITS = 30

sys.path.insert(0, str(EXAMPLE))
import bank  # noqa: E402


def start(folder: Path, *, in_place_of: int | None = None) -> subprocess.Popen[str]:
    command = [str(EXAMPLE / "agent.py"), str(folder / "agent.db"), str(folder)]
    if in_place_of is not None:
        command = [str(KILLED), str(in_place_of), *command]
    return subprocess.Popen([sys.executable, *command], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def ended(process: subprocess.Popen[str]) -> str:
    """What it printed; nothing, if it was killed."""
    said, _ = process.communicate(timeout=60)
    assert process.returncode in (0, -signal.SIGKILL), said
    return said if process.returncode == 0 else ""


class KillingBank(bank.Bank):
    """A bank that ends the agent's process at one place of one charge, once."""

    def __init__(self, folder: Path, at: tuple[str, str] | None = None) -> None:
        super().__init__(folder)
        self.at = at
        self.process: subprocess.Popen[str] | None = None
        self.asked: list[str] = []
        self.kills = 0

    def charge(self, key: str, account: str, amount: int) -> bank.Charge:
        self.asked.append(key)
        self.reached("before", account)
        charge = super().charge(key, account, amount)
        self.reached("after", account)
        return charge

    def reached(self, place: str, account: str) -> None:
        if self.at == (place, account):
            self.at = None
            assert self.process is not None
            self.process.kill()
            self.process.wait()
            self.kills += 1


@contextmanager
def serving(folder: Path, kept: KillingBank) -> Iterator[None]:
    server = bank.opened(folder, kept)
    # One that answers a dead process raises there, in its own thread.
    server.handle_error = lambda request, client_address: None
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def ledger(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "ledger.jsonl").read_text().splitlines()]


def check(folder: Path) -> None:
    """Each account was charged once, and the model was told each receipt."""
    charges = ledger(folder)
    assert sorted((charge["account"], charge["amount"]) for charge in charges) == sorted(DUE.items())
    records = asyncio.run(read_records(SqliteStorage(folder / "agent.db")))
    results = [message for entry in records.of(TOOL_RESULT) for message in decode_messages(entry.raw_messages)]
    told = [result.text for result in results if isinstance(result, ToolResultMessage)]
    assert sorted(told) == sorted(
        f"{charge['account']} was charged {charge['amount']}: receipt {charge['receipt']}" for charge in charges
    )


@pytest.mark.parametrize("account", sorted(DUE))
@pytest.mark.parametrize("place", ["before", "after"])
def test_killed_while_the_bank_is_asked_each_account_is_charged_once_h93(
    account: str, place: str, tmp_path: Path
) -> None:
    kept = KillingBank(tmp_path, (place, account))
    with serving(tmp_path, kept):
        kept.process = start(tmp_path)
        assert ended(kept.process) == ""
        assert ended(start(tmp_path)) == "All is charged.\n"
        assert ended(start(tmp_path)) == "All is charged.\n"
    assert kept.kills == 1
    check(tmp_path)


@pytest.mark.timeout(300)
def test_killed_in_place_of_any_commit_and_again_each_account_is_charged_once_h93(tmp_path: Path) -> None:
    kills = 0
    for number in range(1, MOST_COMMITS):
        folder = tmp_path / str(number)
        folder.mkdir()
        with serving(folder, KillingBank(folder)):
            said = ended(start(folder, in_place_of=number))
            if said:
                break  # it has no commit of that number
            kills += 1
            ended(start(folder, in_place_of=2))
            assert ended(start(folder)) == "All is charged.\n"
        check(folder)
    else:
        pytest.fail(f"it makes {MOST_COMMITS} commits and more")
    assert kills >= 6, "there was something to cut off"


@pytest.mark.parametrize("place", ["before", "after"])
def test_the_bank_is_killed_while_it_charges_each_account_is_charged_once_h93(place: str, tmp_path: Path) -> None:
    banks = [subprocess.Popen([sys.executable, str(DYING), str(tmp_path), place, "bob"])]
    try:
        agent = start(tmp_path)
        assert banks[0].wait(timeout=60) == -signal.SIGKILL
        agent.kill()  # and the agent as well, while it tries again
        assert ended(agent) == ""
        banks.append(subprocess.Popen([sys.executable, str(EXAMPLE / "bank.py"), str(tmp_path)]))
        assert ended(start(tmp_path)) == "All is charged.\n"
    finally:
        for process in banks:
            process.kill()
            process.wait()
    check(tmp_path)


def test_a_line_that_was_cut_off_is_no_charge(tmp_path: Path) -> None:
    first = bank.Bank(tmp_path)
    made = first.charge("one", "ada", 90)
    with (tmp_path / "ledger.jsonl").open("ab") as file:
        file.write(b'{"key": "two", "acc')
    second = bank.Bank(tmp_path)
    assert second.find("one") == made
    assert second.find("two") is None
    assert second.charge("two", "bob", 20)["receipt"] == 2
    assert [charge["key"] for charge in ledger(tmp_path)] == ["one", "two"]
    assert second.charge("one", "ada", 90) == made
    with pytest.raises(bank.KeyUsed):
        second.charge("one", "ada", 91)
