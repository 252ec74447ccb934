"""The process that gets killed: ``python agent.py FOLDER BASE_URL``. A host like any other: submit, wait, go on."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

from job import INSTRUCTIONS, JOBS, Guided, tools
from perdure import Harness, RetryPolicy, Unanswered
from perdure.cli.demo.agent import DemoStorage, Watcher, stand, tell


async def work(folder: Path, base_url: str) -> None:
    async with Harness.open(
        DemoStorage(folder / "agent.db"),
        models=Guided(base_url),
        extensions=[tools(folder)],
        instructions=INSTRUCTIONS,
        retry=RetryPolicy(first_ms=200, jitter=0.0),
        on_report=lambda report: tell(report=report.type, message=report.message),
    ) as harness:
        found = [{"kind": task.kind, "status": task.status} for task in (await harness.inspect()).tasks]
        tell(found=found, commits=harness.session.seq)
        if harness.session.seq:
            stand("recovery")
        harness.session.observe(Watcher())
        root = await harness.root()
        for job in JOBS:
            submission = await root.submit(job.text, request_id=job.request_id)
            try:
                words = (await submission.answer()).text
            except Unanswered as why:
                words = f"({why})"
            tell(job=job.request_id, answered=" ".join(words.split()))
    tell(finished=True)


if __name__ == "__main__":
    asyncio.run(work(Path(sys.argv[1]), sys.argv[2]))
