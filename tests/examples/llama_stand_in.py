"""In place of a Python with llama_cpp: it says where the model is, and serves, streaming like llama.cpp's server does.

Nulls for what is not there, a call's name with each of its pieces, white space behind the arguments, no usage.
"""

from __future__ import annotations

import json
import os
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

HERE = Path(os.environ["STAND_IN"])
"""Its folder. With a file ``dies`` in it, it does not come up."""
WRONG = 7
"""However many are to be ordered."""


def arguments(tool: str, said: str) -> dict[str, Any]:
    match tool:
        case "read":
            return {"path": "stock.py"}
        case "run":
            return {"command": said.removeprefix("Run ").removesuffix(" again.")}
        case "edit":
            return {"path": "stock.py", "old_text": "have - want", "new_text": "want - have"}
        case "write":
            return {"path": "REPORT.md", "content": said.partition(": ")[2]}
        case "order":
            return {"item": said.split()[1].rstrip(","), "count": WRONG}
        case _:
            return {}


def chunks(name: str | None, said: str) -> list[dict[str, Any]]:
    text = f"{json.dumps(arguments(name, said))} \n" if name else "I did what you said."
    deltas: list[dict[str, Any]] = [{"role": "assistant", "content": None, "function_call": None, "tool_calls": None}]
    for at in range(0, len(text), 3):
        called = {"name": name, "arguments": text[at : at + 3]}
        call = {"index": 0, "id": "call_0", "type": "function", "function": called}
        deltas.append({"role": None, "content": None, "tool_calls": [call]} if name else {"content": text[at : at + 3]})
    choices: list[dict[str, Any]] = [{"index": 0, "finish_reason": None, "delta": delta} for delta in deltas]
    choices.append({"index": 0, "finish_reason": "tool_calls" if name else "stop", "delta": {"content": None}})
    shared = {"id": "c", "object": "chat.completion.chunk", "created": 1, "model": "m"}
    return [{**shared, "choices": [choice]} for choice in choices]


class Handler(BaseHTTPRequestHandler):
    def log_message(self, format: str, *args: object) -> None:
        pass

    def do_GET(self) -> None:
        self.answer('{"object": "list", "data": [{"id": "m"}]}', "application/json")

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        assert all(message.get("content", "") is not None for message in body["messages"])
        assert body["max_tokens"] > 0
        said = [message["content"] for message in body["messages"] if message["role"] == "user"][-1]
        choice = body.get("tool_choice")
        name = choice["function"]["name"] if isinstance(choice, dict) else None
        events = [f"data: {json.dumps(chunk)}\n\n" for chunk in chunks(name, said)]
        self.answer("".join([*events, "data: [DONE]\n\n"]), "text/event-stream")

    def answer(self, text: str, kind: str) -> None:
        self.send_response(200)
        self.send_header("content-type", kind)
        self.send_header("content-length", str(len(text.encode())))
        self.end_headers()
        self.wfile.write(text.encode())


if __name__ == "__main__":
    if sys.argv[1] == "-c":
        print(HERE)
        sys.exit()
    assert sys.argv[1:3] == ["-m", "llama_cpp.server"], sys.argv
    (HERE / "pid").write_text(str(os.getpid()))
    if (HERE / "dies").exists():
        sys.exit("no such model")
    given = dict(zip(sys.argv[3::2], sys.argv[4::2], strict=True))
    ThreadingHTTPServer((given["--host"], int(given["--port"])), Handler).serve_forever()
