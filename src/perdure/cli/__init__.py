"""Floor 8: the ``perdure`` command. No rules of its own: each command shows or drives what floors below do."""

from __future__ import annotations


def main() -> None:
    """The console script."""
    from perdure.cli.app import app

    app()
