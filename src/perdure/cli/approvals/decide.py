"""``perdure approvals ls``, ``allow`` and ``deny``."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

import msgspec
import typer

from perdure.cli.approvals.arguments import argument_lines, who
from perdure.cli.approvals.ask import KEPT, NOT_YET, done
from perdure.cli.decided import call_over
from perdure.cli.errors import CommandError
from perdure.cli.exact import ascii_json, exact
from perdure.cli.secrets import Secrets
from perdure.cli.stores import looking
from perdure.cli.style import Line, rendered
from perdure.cli.text import when
from perdure.harness.approval import ApprovalRefused, check_words
from perdure.harness.approvals import Question, pending
from perdure.harness.harness import Harness
from perdure.kernel.errors import NotJson
from perdure.kernel.json import JsonValue, decode_json

_secrets = Secrets()


async def waiting(path: Path) -> list[Question]:
    """Raises what opening a store raises."""
    async with looking(path) as session:
        return await pending(session)


def render(found: list[Question], *, as_json: bool) -> None:
    if as_json:
        for question in found:
            typer.echo(ascii_json(msgspec.json.encode(asdict(question))))
        return
    if not found:
        typer.echo("no call waits for approval")
    for question in found:
        typer.echo(
            f"{question.task}  {exact(question.tool)}  in conversation {question.conversation_id}, "
            f"asked {when(question.asked_at)}, until {when(question.expires_at)}"
        )
        lines: list[Line] = argument_lines(question.arguments, indent="    ")
        for each in lines:
            typer.echo(_secrets.hide(rendered(each, "none")))


async def decide(path: Path, task: int, *, allow: bool, reason: str = "", edit: str | None = None) -> int:
    """Decide about the call as it stands in the store now; the exit code. Raises CommandError."""
    try:
        check_words(reason, "a reason")
    except ValueError as error:
        raise CommandError(str(error)) from error
    question = next((q for q in await waiting(path) if q.task == task), None)
    if question is None:
        # One that has just begun to wait is seen by the next look.
        raise await call_over(path, task) or CommandError(f"call {task} has only now begun to wait; try again")
    arguments = None if edit is None else _edited(edit)
    by = who()
    body: dict[str, JsonValue] = {
        "task": task,
        "allow": allow,
        "digest": question.digest,
        "reason": reason,
        "by": by,
        "arguments": arguments,
    }

    async def here(harness: Harness) -> dict[str, JsonValue]:
        try:
            first = await harness.decide(task, allow=allow, digest=question.digest, reason=reason, by=by)
        except ApprovalRefused as error:
            raise CommandError(str(error)) from error
        return {"first": first}

    # Edited arguments are checked by the tool, which this process does not have.
    try:
        result = await done(path, "approval", body, here if arguments is None else None)
    except CommandError as error:  # perhaps it was over in between
        raise (await call_over(path, task) or error) from None
    if result is None:
        typer.echo(KEPT, err=True)
        return NOT_YET
    if not result["first"]:
        raise await call_over(path, task) or CommandError(f"call {task} was decided already")
    what = "denied" if not allow else "allowed" if arguments is None else "allowed with other arguments"
    typer.echo(f"{what}: call {task} of {exact(question.tool)}")
    return 0


def _edited(text: str) -> dict[str, JsonValue]:
    try:
        value = decode_json(text.encode("utf-8", "replace"))
    except NotJson as error:
        raise CommandError(f"--edit: {error}") from error
    if not isinstance(value, dict):
        raise CommandError("--edit: the arguments are one JSON object, all of them, by their names")
    return value
