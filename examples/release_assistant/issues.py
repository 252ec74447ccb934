"""The team's list of open issues, as an MCP server on standard input and output, made with the official SDK."""

from __future__ import annotations

from mcp.server.mcpserver import MCPServer
from mcp.types import ToolAnnotations

server = MCPServer("issues", version="1", log_level="CRITICAL")


@server.tool(annotations=ToolAnnotations(read_only_hint=True))
def blocking(version: str) -> str:
    """Which open issues block a release."""
    return f"no open issue blocks {version}"


if __name__ == "__main__":
    server.run("stdio")
