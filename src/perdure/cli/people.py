"""``perdure questions``: what tools ask a person, listed and answered from another terminal (rules H330, H331)."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from perdure.cli.errors import run_command

if TYPE_CHECKING:
    from perdure.harness.harness import Harness
    from perdure.harness.person import PersonQuestion
    from perdure.kernel.json import JsonValue

app = typer.Typer(help="Questions that tools ask a person and wait for.", no_args_is_help=True)

Store = Annotated[Path, typer.Argument(help="A store, a file or a directory, in use or not.")]


@app.command()
def ls(store: Store, as_json: Annotated[bool, typer.Option("--json", help="A JSON object a line.")] = False) -> None:
    """List what is asked, with the JSON Schema of each answer where it is not any text."""
    found = run_command("questions ls", _waiting(store))
    if not found and not as_json:
        typer.echo("nothing is asked")
    for question in found:
        typer.echo(_as_json(question) if as_json else _told(question))


@app.command()
def answer(
    store: Store,
    question: Annotated[int, typer.Argument(help="Its number, as ls shows it.")],
    value: Annotated[str, typer.Argument(help="The answer: a text, or JSON where that is asked for.")],
) -> None:
    """Answer a question. Where nobody has the store open, its call goes on when its host comes back."""
    raise typer.Exit(run_command("questions answer", _answer(store, question, value)))


async def _waiting(path: Path) -> list[PersonQuestion]:
    """Raises what opening a store raises."""
    from perdure.cli.stores import looking
    from perdure.harness.person import questions

    async with looking(path) as session:
        return await questions(session)


def _as_json(question: PersonQuestion) -> str:
    import msgspec

    from perdure.cli.exact import ascii_json

    names = ("task", "conversation_id", "call", "tool", "text", "schema", "asked_at", "expires_at")
    return ascii_json(msgspec.json.encode({name: getattr(question, name) for name in names}))


def _told(question: PersonQuestion) -> str:
    from perdure.cli.asked import answer_words, question_lines
    from perdure.cli.secrets import Secrets
    from perdure.cli.text import one_line, when

    lines = [
        f"{question.task}  {one_line(question.tool)}  in conversation {question.conversation_id}, "
        f"asked {when(question.asked_at)}, until {when(question.expires_at)}",
        *(f"    {text}" for text in question_lines(question.text)),
    ]
    if question.schema != {"type": "string"}:
        lines.append(f"    answer: {answer_words(question.schema)}")
    return Secrets().hide("\n".join(lines))


async def _answer(path: Path, task: int, value: str) -> int:
    """The exit code. Raises CommandError."""
    from perdure.cli.approvals.ask import KEPT, NOT_YET, done
    from perdure.cli.decided import question_over
    from perdure.cli.errors import CommandError
    from perdure.harness.person import AnswerRefused
    from perdure.kernel.errors import NotJson
    from perdure.kernel.json import check_json

    try:
        check_json(value, at="the answer")
    except NotJson as error:
        raise CommandError(str(error)) from error
    if (over := await question_over(path, task)) is not None:
        raise over

    async def here(harness: Harness) -> dict[str, JsonValue]:
        for question in await harness.questions():
            if question.task == task:
                try:
                    return {"first": await question.answer(value)}
                except AnswerRefused as error:
                    raise CommandError(str(error)) from error
        return {"first": False}

    try:
        result = await done(path, "answer", {"task": task, "value": value}, here)
    except CommandError as error:  # perhaps it was over in between
        raise (await question_over(path, task) or error) from None
    if result is None:
        typer.echo(KEPT, err=True)
        return NOT_YET
    if not result["first"]:
        raise await question_over(path, task) or CommandError(f"question {task} was answered already")
    typer.echo(f"answered: question {task}")
    return 0
