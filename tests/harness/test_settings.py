"""Host settings: how long a retry waits, and what is refused (rules H44, H48, H72, H73)."""

from __future__ import annotations

from inspect import signature

import pytest
from hypothesis import given
from hypothesis import strategies as st

from perdure.harness.approval import Approvals
from perdure.harness.harness import Harness
from perdure.harness.settings import RetryPolicy, Settings


def test_waits_begin_at_two_seconds_and_double_h72_h73() -> None:
    policy = RetryPolicy()
    assert [policy.delay(n, fraction=0.0) for n in (1, 2, 3, 4)] == [2_000, 4_000, 8_000, None]


def test_doubling_ends_at_a_minute_h73() -> None:
    policy = RetryPolicy(retries=100)
    assert [policy.delay(n, fraction=0.0) for n in (5, 6, 7, 100)] == [32_000, 60_000, 60_000, 60_000]


def test_a_retry_after_is_respected_and_bounded_h73() -> None:
    policy = RetryPolicy(longest_retry_after_ms=600_000)
    assert policy.delay(1, fraction=0.0, retry_after_ms=90_000) == 90_000
    assert policy.delay(1, fraction=0.0, retry_after_ms=10) == 2_000
    assert policy.delay(1, fraction=0.0, retry_after_ms=600_001) is None


@given(st.integers(1, 60), st.floats(0, 1, exclude_max=True))
def test_jitter_only_adds_and_at_most_its_share_h73(retry: int, fraction: float) -> None:
    policy = RetryPolicy(retries=60, jitter=0.5)
    plain = policy.delay(retry, fraction=0.0)
    jittered = policy.delay(retry, fraction=fraction)
    assert plain is not None
    assert jittered is not None
    assert plain <= jittered <= plain * 1.5


def test_what_a_host_that_sets_nothing_gets_h44_h48_h68_h300() -> None:
    """Rules T42, K58, K82 and K114 too."""
    stated = {
        "steer": "all",
        "follow_up": "first",
        "after_failure": "keep",
        "partial_interval_ms": 100,
        "restart_limit": 5,
        "drain_ms": 10_000,
        "line_bound_ms": 1_000,
        "document_retention_ms": 600_000,
    }
    parameters = signature(Harness.open).parameters
    assert {name: parameters[name].default for name in stated} == stated
    settings = Settings()
    of_settings = ("steer", "follow_up", "after_failure", "partial_interval_ms")
    assert [getattr(settings, name) for name in of_settings] == [stated[name] for name in of_settings]
    assert Approvals().expire_after_ms == 24 * 3_600_000


@pytest.mark.parametrize(
    "bad",
    [
        {"steer": "some"},
        {"follow_up": "none"},
        {"after_failure": "forget"},
        {"partial_interval_ms": -1},
        {"instructions": "half of a character: \ud83d"},
        {"instructions": 5},
    ],
)
def test_a_setting_that_is_none_is_refused(bad) -> None:
    with pytest.raises((TypeError, ValueError), match=next(iter(bad))):
        Settings(**bad)


@pytest.mark.parametrize("bad", [{"retries": -1}, {"first_ms": 0}, {"jitter": 1.5}])
def test_a_retry_policy_that_makes_no_sense_is_refused(bad) -> None:
    with pytest.raises(ValueError, match=next(iter(bad))):
        RetryPolicy(**bad)
