"""Starting a chat: its store, conversation, model and directory; and leaving it."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path
from typing import Final

from perdure.cli.chat.commands import level
from perdure.cli.chat.models import TRY, Catalogue
from perdure.cli.chat.places import Places, Site
from perdure.cli.chat.resumed import resumed
from perdure.cli.chat.scene import Scene
from perdure.cli.chat.screen import PlainScreen, Screen
from perdure.cli.chat.session import INTERRUPTED, Chat
from perdure.cli.chat.story import Story
from perdure.cli.chat.terminal import Writer
from perdure.cli.entries import messages_of
from perdure.cli.errors import CommandError
from perdure.cli.inspect import HolderLine, holder_line
from perdure.cli.secrets import Secrets
from perdure.cli.space.words import went_on
from perdure.cli.stores import chosen, default_store, make_room, name_of, named, recent, storage_of
from perdure.cli.style import Line, Style, colours_of, line
from perdure.cli.text import counted, printable
from perdure.events import Snapshot
from perdure.harness.approval import Approvals
from perdure.harness.approvals import Question as WaitingCall
from perdure.harness.approvals import question_of
from perdure.harness.conversation import Conversation
from perdure.harness.documents import Agent, Inbox, Live
from perdure.harness.harness import Harness
from perdure.harness.limits import Limits
from perdure.harness.messages import UserMessage
from perdure.harness.model import ThinkingLevel
from perdure.harness.person import PersonQuestion, open_question
from perdure.harness.registry import Extension
from perdure.kernel.clock import SystemClock
from perdure.kernel.errors import StorageBusy
from perdure.kernel.reports import Report
from perdure.kernel.session import Session
from perdure.storage.lock import read_holder
from perdure.tools.coding import coding_tools
from perdure.tools.people import ask_user

INSTRUCTIONS: Final = (
    "You help a person at a terminal. You can read, write and edit files and run commands in the working directory. "
    "The person sees your words as plain text, and your calls with the end of their output: do not repeat it."
)
MODEL_VARIABLE: Final = "PERDURE_MODEL"
MAIL_LOOKS: Final = 100
"""How often it is looked whether all mail has been taken up."""
WINDOW: Final = 60
"""Entries of a snapshot."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """What was asked for on the command line."""

    text: str | None
    db: Path | None
    model: str | None
    thinking: str | None
    limit_usd: float | None
    limit_turns: int | None
    ask: tuple[str, ...]
    """Tools, or patterns of their names, whose calls the user has to allow."""
    name: str | None
    conversation: str | None
    resume: bool
    """Go on in the newest conversation."""
    new: bool
    plain: bool
    directory: Path | None
    takeover: bool
    """Also of a store that another process has, which is frozen."""
    space: Path | None
    """A directory that is to be the workspace of a Space."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Before:
    """What there was before this chat."""

    killed: HolderLine | None
    """Who had the store open, and ended without closing it."""
    opened_at: int
    """When this one opened it; ms UTC."""


async def chat(options: Options) -> int:
    """The exit code. Raises CommandError, and what opening a store raises."""
    store = options.db or default_store()
    catalogue = Catalogue(os.environ.get(MODEL_VARIABLE) or None)
    if options.model is not None:
        catalogue.default = catalogue.use(options.model)
    elif catalogue.default is None and not store.exists():
        raise _no_model()
    limits, thinking = _limits(options), None if options.thinking is None else level(options.thinking)
    directory = None if options.directory is None else _directory(options.directory, "--dir")
    workspace = None if options.space is None else _directory(options.space, "--space")
    make_room(store)
    terminal = Terminal(plain=options.plain)
    places = Places()
    before = Before(killed=_killed(store), opened_at=SystemClock().wall())
    opening = Harness.open(
        storage_of(store),
        models=catalogue,
        extensions=[coding_tools(), Extension("people", tools=[ask_user])],
        environment=places.environment_of,
        instructions=INSTRUCTIONS,
        conversation_limits=limits,
        approvals=Approvals(tools=options.ask),
        takeover=options.takeover,
        on_report=terminal.report,
    )
    try:
        with terminal.signals():
            async with opening as harness:
                await places.attach(harness.session)
                if workspace is not None:
                    await places.settle(workspace)
                await _take_mail(harness)
                where = workspace or directory
                conversation = await _conversation(harness, options, catalogue, where)
                agent = await _settle(conversation, options, catalogue, thinking, where)
                thinks = "" if agent.thinking == "off" else f" · thinking {agent.thinking}"
                terminal.introduce(f"perdure chat · {agent.model}{thinks} · {agent.cwd}", "bold")
                named_so = (await conversation.info()).name
                terminal.introduce(
                    f"conversation {conversation.id}{f' “{named_so}”' if named_so else ''} in {store} · /help", "dim"
                )
                site = None if agent.cwd is None else await places.open(agent.cwd)
                if site is not None:
                    terminal.introduce(site.words, "dim")
                await _sit(terminal, harness, conversation, catalogue, options.text, before, site)
        for name in () if harness.closed is None else harness.closed.stragglers:
            terminal.screen.put(line(f"! did not stop: {printable(name)}", "error"))
    except StorageBusy as error:
        raise CommandError(f"{error}. To say something there from here: perdure send {store} TEXT") from error
    finally:
        await terminal.finish()
    return terminal.code


class Terminal:
    """The screen, as this process's input and output allow, and the signals."""

    def __init__(self, *, plain: bool) -> None:
        self.types = os.isatty(0)
        """A person types; else lines are answered one after the other."""
        self.code = 0
        """What the program exits with."""
        self.chat: Chat | None = None
        """While there is one."""
        self.leaves = False
        """It is to leave, from before there was a chat on."""
        self.impatient = False
        """Ctrl-C was typed where there is no chat: the next one ends the process."""
        sees = os.isatty(1)
        colours = colours_of(plain=plain, terminal=sees)
        self._writer = Writer(1, encoding=sys.stdout.encoding or "utf-8", on_broken=self._gone)
        self.screen: Screen
        if self.types and colours != "none":
            # Only here: it takes longer to import than all the rest.
            from perdure.cli.chat.prompt import PromptScreen

            self.screen = PromptScreen(self._writer, colours, Secrets())
        else:
            self.screen = PlainScreen(self._writer, colours, Secrets(), asks=self.types and sees)
        self.echoes = self.types and sees and self.screen.follows
        """What is typed stands on the screen already."""

    def introduce(self, text: str, style: Style) -> None:
        if self.types:
            self.screen.put(line(printable(text), style))

    def report(self, report: Report) -> None:
        told = went_on(report.type, report.message)
        self.screen.put(line(f"↻ {printable(told)}" if told else f"· {printable(report.message)}", "warning"))

    @contextmanager
    def signals(self) -> Generator[None]:
        """From the opening of the store to its closing, which both may take their time."""
        loop = asyncio.get_running_loop()
        known = {signal.SIGINT: self._interrupted, signal.SIGTERM: self._leave, signal.SIGHUP: self._leave}
        for number, handle in known.items():
            loop.add_signal_handler(number, handle)
        try:
            yield
        finally:
            for number in known:
                loop.remove_signal_handler(number)

    def _interrupted(self) -> None:
        if self.chat is not None:
            self.chat.interrupt()
        elif self.impatient:
            os._exit(INTERRUPTED)  # a kill, which is what everything here is made for
        else:
            self.impatient = True
            self.screen.put(line("Ctrl-C again ends this at once; the next start goes on as after a kill.", "warning"))

    def _leave(self) -> None:
        self.leaves = True
        if self.chat is not None:
            self.chat.leave()

    def _gone(self) -> None:
        """Nobody reads what is written."""
        self.code = 1
        self._leave()

    async def finish(self) -> None:
        await self._writer.finish()


async def _sit(
    terminal: Terminal,
    harness: Harness,
    conversation: Conversation,
    catalogue: Catalogue,
    text: str | None,
    before: Before,
    site: Site | None,
) -> None:
    """The chat itself, from what is there to the user's leaving."""
    screen = terminal.screen
    clock = harness.session.clock

    def find(task: int) -> PersonQuestion | WaitingCall | None:
        record, now = harness.session.live.settled.get(task), clock.wall()
        return None if record is None else open_question(record, now, harness) or question_of(record, now)

    story = Story(screen, now=clock.wall, echoed=terminal.echoes, find=find)
    screen.show(story)
    chat = Chat(harness, conversation, screen, story, catalogue)
    async with conversation.events(window=WINDOW) as events:
        first = await anext(events)
        assert isinstance(first, Snapshot), "events begin with a snapshot"
        scene = Scene.of(first)
        story.begin(scene)
        lines = resumed(
            scene,
            story,
            conversation=conversation.id,
            killed=before.killed,
            opened_at=before.opened_at,
            registry=harness.registry,
            agent=await conversation.agent(),
            tasks=(await harness.inspect()).tasks,
            space=None if site is None else site.state,
        )
        screen.put(*lines, *await _asked_elsewhere(harness, conversation.id))
        story.ask()
        screen.recall(_inputs(scene))
        terminal.chat = chat
        if terminal.leaves:
            chat.leave()
        try:
            harness.resume()
            if terminal.types:
                if text is not None:
                    chat.typed(text, steer=False)
                await chat.attend(events)
            else:
                await chat.answer_lines(events, text)
        finally:
            terminal.chat = None
    terminal.code = terminal.code or chat.code
    if harness.session.failed is None and (story.busy or story.waiting_inputs):
        # Also an abort that is on its way to the disk: closing waits for it.
        live = [task for task in harness.session.live.staged.values() if task.conversation_id == conversation.id]
        if any(task.abort_requested for task in live) or not (live or story.waiting_inputs):
            screen.put(line("Left while the run was being ended; it does not go on.", "warning"))
        else:
            screen.put(line("Left in the middle of a run; it goes on when the chat is started again.", "warning"))


async def _asked_elsewhere(harness: Harness, conversation: int) -> list[Line]:
    """That other conversations wait for a person, who is not asked here."""
    asked = [question.conversation_id for question in await harness.questions()]
    calls = [approval.conversation_id for approval in await harness.approvals()]
    lines: list[Line] = []
    for found, what, how in ((asked, "question", "perdure questions ls"), (calls, "call", "perdure approvals ls")):
        count = sum(id != conversation for id in found)
        if count:
            verb = "waits" if count == 1 else "wait"
            lines.append(line(f"· {counted(count, what)} of other conversations {verb} for a person: {how}", "warning"))
    return lines


def _inputs(scene: Scene) -> list[str]:
    """What was said before, for the arrow keys."""
    return [
        message.text
        for entry in scene.entries
        for message in messages_of(entry)
        if isinstance(message, UserMessage) and message.text
    ]


# --- what it takes place in --------------------------------------------------------------------------------------


async def _take_mail(harness: Harness) -> None:
    """What was sent while the store was closed is there before a conversation is chosen, within a bound."""
    for _ in range(MAIL_LOOKS):
        if not await harness.session.storage.mail(limit=1):
            return
        await harness.session.clock.sleep(0.02)


async def _conversation(
    harness: Harness, options: Options, catalogue: Catalogue, directory: str | None
) -> Conversation:
    """The conversation that is asked for; a new one has its settings from the commit that makes it."""
    session = harness.session
    if options.conversation is not None:
        return harness.handle((await chosen(session, options.conversation)).id)
    if options.name is not None and not options.new:
        id = await named(session, options.name)
        if id is not None:
            return harness.handle(id)
        if options.resume:
            raise CommandError(f"there is no conversation named {options.name!r}; without --continue it is made")
    newest = await recent(session)
    if options.resume:
        return harness.handle((await chosen(session, None)).id)
    fresh = options.new or options.name is not None
    if not fresh and newest.active is not None and await _unfinished(session, newest.active):
        return harness.handle(newest.active)
    last = Agent() if newest.active is None else await harness.handle(newest.active).agent()
    model = _model(catalogue, options.model or catalogue.default or last.model)
    agent = Agent(model=model, cwd=directory or os.getcwd())
    if options.name is None and newest.unused is not None and await name_of(session, newest.unused) is None:
        unused = harness.handle(newest.unused)
        await unused.set_agent(model=agent.model, cwd=agent.cwd)
        return unused
    return await harness.create_conversation(agent=agent, name=options.name)


async def _unfinished(session: Session, conversation: int) -> bool:
    live = await session.snapshot(Live, conversation=conversation)
    inbox = await session.snapshot(Inbox, conversation=conversation)
    return (live is not None and live.run is not None) or (inbox is not None and bool(inbox.items))


async def _settle(
    conversation: Conversation,
    options: Options,
    catalogue: Catalogue,
    thinking: ThinkingLevel | None,
    directory: str | None,
) -> Agent:
    """Its settings, with what the command line changes and what they lack."""
    agent = await conversation.agent()
    model = _model(catalogue, options.model or agent.model or catalogue.default)
    catalogue.default = model
    where = directory or _still_there(agent.cwd) or os.getcwd()
    thinks = thinking or agent.thinking
    if (agent.model, agent.thinking, agent.cwd) != (model, thinks, where):
        await conversation.set_agent(model=model, thinking=thinks, cwd=where)
    return await conversation.agent()


def _limits(options: Options) -> Limits:
    """Of each conversation, as long as this chat lasts. Raises CommandError."""
    usd = None if options.limit_usd is None else Decimal(repr(options.limit_usd))
    try:
        return Limits(cost_usd=usd, turns=options.limit_turns)
    except ValueError as error:
        raise CommandError(str(error)) from error


def _model(catalogue: Catalogue, wanted: str | None) -> str:
    """A model that can be asked. Raises CommandError."""
    if wanted is None:
        raise _no_model()
    return catalogue.use(wanted)


def _no_model() -> CommandError:
    return CommandError(f"no model is chosen: --model provider:name, or set {MODEL_VARIABLE}. {TRY}")


def _killed(store: Path) -> HolderLine | None:
    """Who had the store open when its process ended."""
    holder = holder_line(read_holder(f"{os.path.realpath(store)}.lock"))
    return holder if holder is not None and holder.state == "ended" else None


def _still_there(directory: str | None) -> str | None:
    return directory if directory is not None and os.path.isdir(directory) else None


def _directory(path: Path, option: str) -> str:
    found = os.path.realpath(path) if option == "--space" else os.path.abspath(path)
    if not os.path.isdir(found):
        raise CommandError(f"{option} {path}: there is no such directory")
    return found
