"""A host that may be killed: ``python host.py FOLDER TOOL REPLAY``. It asks for one call, once whatever becomes of the
process, and prints its result."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

from mcp_kit import results, wares

from perdure import Harness, SqliteStorage, mcp_extension
from perdure.testing.model import ScriptedModel, call, say


async def main(folder: Path, tool: str, replay) -> None:
    model = ScriptedModel([call(tool, name="a"), say("Done.")])
    async with (
        mcp_extension("w", wares(folder), replay={"wait": replay}) as server,
        Harness.open(SqliteStorage(folder / "host.db"), models=model, extensions=[server.extension]) as harness,
    ):
        await (await (await harness.root()).submit("Go.", request_id="go")).answer()
        (result,) = await results(harness)
        print(f"{result.code}: {result.text}")


asyncio.run(main(Path(sys.argv[1]), *sys.argv[2:]))
