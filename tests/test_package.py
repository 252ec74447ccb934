"""The package as an installed distribution."""

from __future__ import annotations

import tomllib
from importlib import metadata, resources
from pathlib import Path

import perdure

PYPROJECT = Path(__file__).parent.parent / "pyproject.toml"


def test_the_version_is_one_number_everywhere() -> None:
    declared = tomllib.loads(PYPROJECT.read_text(encoding="utf-8"))["project"]["version"]
    assert perdure.__version__ == declared
    assert metadata.version("perdure") == declared


def test_types_are_shipped() -> None:
    assert resources.files(perdure).joinpath("py.typed").is_file()
