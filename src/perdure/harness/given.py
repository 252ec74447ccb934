"""Whether the parts that a harness is opened with are such parts; one that is not is refused before anything is opened.

Of untyped callers: a part of another kind would be noticed by the first run that needs it, perhaps after hours.
"""

from __future__ import annotations

from collections.abc import Iterable
from inspect import getattr_static
from os import PathLike, fspath

from perdure.harness.approval import Approvals
from perdure.harness.registry import Extension


def check_parts(
    *, models: object, extensions: object, environment: object, approvals: object, telemetry: object
) -> None:
    """Raises TypeError, which says what is wanted."""
    for what, part in (("models", models), ("telemetry", telemetry)):
        if isinstance(part, type):
            raise TypeError(f"{what}: the class {part.__name__} is no such object; {part.__name__}(...) makes one")
    if models is not None and (lacking := _lacking(models, "default", "find", "stream")):
        raise TypeError(
            "models are 'provider:name', or an object with default, find and stream: "
            f"{type(models).__name__} has no {lacking}"
        )
    if isinstance(extensions, Extension) or not isinstance(extensions, Iterable):
        raise TypeError(f"extensions are a list, also one alone: extensions=[...], not {type(extensions).__name__}")
    if isinstance(environment, str | PathLike):
        raise TypeError(f"a path is no environment: LocalEnvironment({fspath(environment)!r}) is one")
    if environment is not None and not callable(environment) and (lacking := _lacking(environment, "for_call")):
        raise TypeError(
            "an environment is a LocalEnvironment, what durable_space(...) gives, or a function of a conversation's "
            f"id: {type(environment).__name__} has no {lacking}"
        )
    if approvals is not None and not isinstance(approvals, Approvals):
        raise TypeError(f"approvals are given as Approvals(tools=(...)), not as {type(approvals).__name__}")
    if telemetry is not None and (lacking := _lacking(telemetry, "begin", "tell")):
        raise TypeError(f"telemetry is given as OpenTelemetry(...): {type(telemetry).__name__} has no {lacking}")


def _lacking(part: object, *names: str) -> str | None:
    """The first name that it does not have. A property is not asked: it may fail, or take its time."""
    missing = object()
    for name in names:
        if getattr_static(part, name, missing) is missing and not hasattr(part, name):
            return name
    return None
