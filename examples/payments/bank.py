"""A payment service on the loopback address: ``python bank.py FOLDER``.

It keeps its ledger in FOLDER/ledger.jsonl, one charge a line, flushed before anybody is told, and writes the address
that the system gave it to FOLDER/address. A charge has an idempotency key: asked again under the same key, it is the
same charge; asked for another one under that key, it refuses. One who has the key may ask whether it was made.
"""

from __future__ import annotations

import json
import os
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

Charge = dict[str, Any]


class KeyUsed(Exception):
    """Another charge has this key."""


class Bank:
    def __init__(self, folder: Path) -> None:
        self._path = folder / "ledger.jsonl"
        self._lock = threading.Lock()
        self._charges: dict[str, Charge] = {}
        lines = self._path.read_bytes().splitlines(keepends=True) if self._path.exists() else []
        whole = [line for line in lines if line.endswith(b"\n")]  # nobody was told of one that was cut off
        if whole != lines:
            self._path.write_bytes(b"".join(whole))
        for line in whole:
            charge = json.loads(line)
            self._charges[charge["key"]] = charge

    def charge(self, key: str, account: str, amount: int) -> Charge:
        """Charge an account, once a key. Raises KeyUsed."""
        with self._lock:
            known = self._charges.get(key)
            if known is not None:
                if (known["account"], known["amount"]) != (account, amount):
                    raise KeyUsed
                return known
            charge = {"key": key, "account": account, "amount": amount, "receipt": len(self._charges) + 1}
            with self._path.open("ab") as ledger:
                ledger.write(json.dumps(charge).encode() + b"\n")
                ledger.flush()
                os.fsync(ledger.fileno())
            self._charges[key] = charge
            return charge

    def find(self, key: str) -> Charge | None:
        with self._lock:
            return self._charges.get(key)


class Handler(BaseHTTPRequestHandler):
    bank: Bank

    def do_POST(self) -> None:
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        try:
            self.answer(200, self.bank.charge(self.headers["Idempotency-Key"], asked["account"], asked["amount"]))
        except KeyUsed:
            self.answer(409, {"error": "another charge has this key"})

    def do_GET(self) -> None:
        charge = self.bank.find(self.path.removeprefix("/charges/"))
        self.answer(404 if charge is None else 200, charge or {"error": "there is no such charge"})

    def answer(self, status: int, value: Charge) -> None:
        body = json.dumps(value).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """It keeps a ledger, and no log."""


def opened(folder: Path, bank: Bank) -> ThreadingHTTPServer:
    """The service of a bank, at an address that it has written down. ``serve_forever()`` begins it."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("BankHandler", (Handler,), {"bank": bank}))
    address = folder / "address.new"
    address.write_text(f"http://127.0.0.1:{server.server_port}")
    address.replace(folder / "address")
    return server


if __name__ == "__main__":
    place = Path(sys.argv[1])
    place.mkdir(parents=True, exist_ok=True)
    opened(place, Bank(place)).serve_forever()
