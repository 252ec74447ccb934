"""Floor 8: the ``perdure`` command. No rules of its own: each command shows or drives what floors below do."""

from __future__ import annotations


def main() -> None:
    """The console script."""
    import os

    for descriptor in range(3):
        try:
            os.fstat(descriptor)
        except OSError:  # it was started with it closed: the next file that is opened, a store, would take its place
            os.open(os.devnull, os.O_RDWR)
    from perdure.cli.app import app

    app()
