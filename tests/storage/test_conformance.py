"""Rule K188: one suite for every backend."""

from __future__ import annotations

from pathlib import Path

import pytest
from postgres_server import Server
from storage_subjects import JsonlSubject, MemorySubject, PostgresSubject, SqliteSubject

from perdure.testing.conformance import CHECKS, Check


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
async def test_memory(check: Check) -> None:
    await check(MemorySubject())


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
async def test_sqlite(check: Check, tmp_path: Path) -> None:
    await check(SqliteSubject(tmp_path / "store.db"))


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
async def test_sqlite_that_does_not_flush(check: Check, tmp_path: Path) -> None:
    """K153: without flushes everything but power loss is the same."""
    await check(SqliteSubject(tmp_path / "store.db", "process"))


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
async def test_jsonl(check: Check, tmp_path: Path) -> None:
    await check(JsonlSubject(tmp_path / "store"))


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
async def test_jsonl_that_flushes(check: Check, tmp_path: Path) -> None:
    """K155: with flushes everything is the same, but for the loss of power."""
    await check(JsonlSubject(tmp_path / "store", fsync=True))


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
async def test_postgres(check: Check, postgres: Server) -> None:
    """K151: on a real server, beside other sessions."""
    await check(PostgresSubject(postgres))
