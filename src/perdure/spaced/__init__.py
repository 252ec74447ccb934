"""The daemon inside a Space: one file of standard-library Python that is copied to where it runs."""

from __future__ import annotations

from pathlib import Path

SPACED = Path(__file__).with_name("spaced.py")
"""The daemon's file. It imports nothing of perdure and runs on Python 3.9 or newer."""
