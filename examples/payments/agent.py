"""An agent that charges accounts: ``python agent.py STORE BANK``, BANK being the folder of bank.py.

Kill it wherever you like and start it again: each account is charged once, and the model is told so.
"""

from __future__ import annotations

import asyncio
import http.client
import json
import sys
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

from perdure import Done, Extension, Harness, NeverHappened, SqliteStorage, ToolCall, ToolError, Unknown, tool
from perdure.testing import ScriptedModel, call, calls, say

TRIES = 100
PAUSE = 0.1

MODEL = ScriptedModel(
    {
        "Charge what is due.": [
            call("charge", account="ada", amount=90),
            calls(call("charge", account="bob", amount=20), call("charge", account="eve", amount=5)),
            say("All is charged."),
        ]
    }
)


def payments(bank: Path) -> Extension:
    @tool
    async def charge(account: str, amount: int, call: ToolCall) -> str:
        """Charge an account, in euros."""
        made = await ask(bank, "/charges", key=call.idempotency_key, charge={"account": account, "amount": amount})
        if made is None:
            raise ToolError("The bank cannot be reached. The account may have been charged or not.")
        return receipt(made)

    @charge.reconcile
    async def charged(call: ToolCall) -> Done | NeverHappened | Unknown:
        """Asked when the process ended behind the intent of a charge, and before its result was stored."""
        made = await ask(bank, f"/charges/{call.idempotency_key}")
        if made is None:
            return Unknown("The bank cannot be reached.")
        # Should the first request still be on its way, the second has the same key: the bank makes one charge of both.
        return Done(receipt(made)) if made else NeverHappened()

    return Extension("payments", tools=[charge])


def receipt(charge: dict[str, Any]) -> str:
    return f"{charge['account']} was charged {charge['amount']}: receipt {charge['receipt']}"


async def ask(bank: Path, path: str, *, key: str = "", charge: dict[str, Any] | None = None) -> dict[str, Any] | None:
    """What the bank says; nothing in it, if there is no such charge; None, if it cannot be reached.

    It may be starting again: the address is read each time. Asking again is harmless, for the key is the same.
    """
    for _ in range(TRIES):
        try:
            return await asyncio.to_thread(request, (bank / "address").read_text() + path, key, charge)
        except (OSError, ValueError, http.client.HTTPException):  # refused, or cut off in an answer
            await asyncio.sleep(PAUSE)
    return None


def request(url: str, key: str, charge: dict[str, Any] | None) -> dict[str, Any]:
    body = None if charge is None else json.dumps(charge).encode()
    asked = urllib.request.Request(url, data=body, headers={"Idempotency-Key": key} if key else {})
    try:
        with urllib.request.urlopen(asked, timeout=5) as answer:
            return json.load(answer)
    except urllib.error.HTTPError as error:
        if error.code == 404:
            return {}
        if error.code == 409:
            raise ToolError("The bank has another charge under this key.") from None
        raise


async def main(store: str, bank: str) -> None:
    async with Harness.open(SqliteStorage(store), models=MODEL, extensions=[payments(Path(bank))]) as harness:
        root = await harness.root()
        submission = await root.submit("Charge what is due.", request_id="due-1")
        print((await submission.answer()).text)


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], sys.argv[2]))
