"""The example's bank, which gets SIGKILL at one charge: ``python dying_bank.py FOLDER before|after ACCOUNT``."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "examples" / "payments"))
import bank

FOLDER, PLACE, ACCOUNT = Path(sys.argv[1]), sys.argv[2], sys.argv[3]


class DyingBank(bank.Bank):
    def charge(self, key: str, account: str, amount: int) -> bank.Charge:
        if ("before", account) == (PLACE, ACCOUNT):
            os.kill(os.getpid(), signal.SIGKILL)
        charge = super().charge(key, account, amount)
        if ("after", account) == (PLACE, ACCOUNT):
            os.kill(os.getpid(), signal.SIGKILL)
        return charge


bank.opened(FOLDER, DyingBank(FOLDER)).serve_forever()
