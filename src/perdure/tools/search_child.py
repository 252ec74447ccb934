"""One search, in a process of its own: a query comes on stdin, the answer goes to stdout, both as JSON.

Run by its path, without the package: it loads the daemon's code, which knows how to search, and nothing else. Where
there is a ripgrep, that says which files are worth reading; which lines match is found out by the daemon's code in any
case, so that the answer does not depend on it.
"""

from __future__ import annotations

import json
import os
import re
import resource
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

_SAME = re.compile(
    r"(?:[^\\\[\](){}|*+?^$.\x00-\x1f\x7f-\U0010ffff]"  # itself
    r"|\\[wWdDsSbB.*+?()\[\]{}|^$\\/-]"
    r"|\[\^?(?:[A-Za-z0-9_ .,:;/=<>@!#%\"'-](?<!--)|\\[wds])+\]"
    r"|\((?:\?:|(?!\?))|[).|^$]|[*+?](?![*+?{])\??|\{\d{1,3}(?:,\d{0,3})?\}(?![*+?{]))*"
)
"""Patterns that ripgrep reads as Python's ``re`` does on bytes."""
_MOST_BYTES = 500_000
"""Of names in one command line."""


def main() -> None:
    job = json.load(sys.stdin)
    limit = int(job["time_s"]) + 1
    resource.setrlimit(resource.RLIMIT_CPU, (limit, limit))  # Whoever waits for the answer may have been killed.
    sys.path.insert(0, job["code"])
    import spaced  # pyright: ignore[reportImplicitRelativeImport, reportMissingImports]

    daemon: Any = spaced
    query = job["query"]
    root = os.fsdecode(daemon.raw_of(job["root"], "root"))
    try:
        answer = daemon.look_through(root, query, sieve(root, query, job["ripgrep"]))
    except daemon.Fail as fail:
        answer = {"fail": [fail.code, fail.message]}
    except OSError as error:
        fail = daemon.fail_of(error)
        answer = {"fail": [fail.code, fail.message]}
    json.dump(answer, sys.stdout)


def sieve(root: str, query: dict[str, Any], ripgrep: str | None) -> Any:
    """What asks ripgrep which of some files may match; None where its answer could be another than ``re``'s."""
    if query["op"] != "grep" or ripgrep is None or not query["pattern"].isascii():
        return None
    if not query["fixed"] and _SAME.fullmatch(query["pattern"]) is None:
        return None
    words = [ripgrep, "--no-config", "--no-unicode", "--text", "--encoding=none", "--null", "--files-with-matches"]
    words += ["--no-ignore", "--hidden", "--no-messages", "--no-heading", "--color=never"]
    words += ["--ignore-case" if query["ignore_case"] else "--case-sensitive"]
    words += ["--fixed-strings"] if query["fixed"] else []
    words += ["--regexp", query["pattern"], "--"]

    def chosen(paths: Sequence[bytes]) -> set[bytes] | None:
        found: set[bytes] = set()
        first = 0
        while first < len(paths):
            last, size = first, 0
            while last < len(paths) and (size == 0 or size + len(paths[last]) < _MOST_BYTES):
                size += len(paths[last]) + 3
                last += 1
            part = [b"./" + path for path in paths[first:last]]
            ran = subprocess.run(  # noqa: S603  (a fixed program; what the model says is one of its arguments)
                [*words, *part], cwd=root, stdin=subprocess.DEVNULL, capture_output=True, check=False
            )
            if ran.returncode not in (0, 1):
                return None  # It could not read one of them, or the pattern.
            found.update(name[2:] for name in ran.stdout.split(b"\0") if name)
            first = last
        return found

    return chosen


if __name__ == "__main__":
    main()
