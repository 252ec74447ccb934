"""The runner's own connection to a daemon: to arm its crash points, and to see and release what is held there.

It speaks the protocol of docs/spaced-protocol.md by itself: the runner judges the product's client, too.
"""

from __future__ import annotations

import json
import os
import socket
import struct
import time
from pathlib import Path
from typing import Any, Literal

_PATIENCE_S = 20.0


class Control:
    """Of the Space in a folder. Raises OSError if its daemon is not there, or ends."""

    def __init__(self, space: Path) -> None:
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.settimeout(_PATIENCE_S)
        folder = os.open(space, os.O_PATH | os.O_CLOEXEC)
        try:  # A path through a descriptor fits an address, however long the folder's is.
            self._socket.connect(f"/proc/self/fd/{folder}/socket")
            self._ask("hello", token=(space / "token").read_text().strip(), protocol=1)
        except BaseException:
            self._socket.close()
            raise
        finally:
            os.close(folder)

    def __enter__(self) -> Control:
        return self

    def __exit__(self, *_: object) -> None:
        self._socket.close()

    def arm(self, point: str, action: Literal["kill", "hold"]) -> None:
        self._ask("arm", point=point, action=action)

    def held(self) -> list[str]:
        return self._ask("armed")["held"]

    def release(self, point: str) -> bool:
        """Whether something was held there."""
        return "error" not in self._exchange("release", point=point)

    def _ask(self, op: str, **fields: object) -> dict[str, Any]:
        answer = self._exchange(op, **fields)
        if "error" in answer:
            raise OSError(f"the daemon refused {op}: {answer['error']}")
        return answer["result"]

    def _exchange(self, op: str, **fields: object) -> dict[str, Any]:
        header = json.dumps({"op": op, "id": 1, **fields}).encode()
        self._socket.sendall(struct.pack("!II", len(header), 0) + header)
        length, body = struct.unpack("!II", self._receive(8))
        answer: dict[str, Any] = json.loads(self._receive(length))
        self._receive(body)
        return answer

    def _receive(self, size: int) -> bytes:
        data = b""
        while len(data) < size:
            data += (more := self._socket.recv(size - len(data)))
            if not more:
                raise OSError("the daemon ended")
        return data


def wait_held(space: Path, point: str, seconds: float) -> bool:
    """Wait until something is held at a point; False if that does not come, or the daemon ends."""
    deadline = time.monotonic() + seconds
    try:
        with Control(space) as control:
            while point not in control.held():
                if time.monotonic() > deadline:
                    return False
                time.sleep(0.002)
    except OSError:
        return False
    return True
