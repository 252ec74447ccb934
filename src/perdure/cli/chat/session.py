"""A chat: one conversation between a screen and a harness."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Final

from perdure.cli.chat.commands import Command, help_lines, level, parse
from perdure.cli.chat.models import Catalogue
from perdure.cli.chat.questions import answer, reply_of
from perdure.cli.chat.screen import Screen, whole_input
from perdure.cli.chat.story import Story
from perdure.cli.chat.terminal import LineReader
from perdure.cli.errors import CommandError
from perdure.cli.style import line
from perdure.cli.text import printable
from perdure.events import Events
from perdure.harness.conversation import Conversation
from perdure.harness.harness import Harness
from perdure.harness.submission import Submission
from perdure.kernel.errors import PerdureError, SessionFailed
from perdure.kernel.observation import WatchEnded

AGAIN_S: Final = 2.0
"""A second Ctrl-C within so many seconds leaves, whatever runs, if nothing was typed in between."""
INTERRUPTED: Final = 130
"""The exit code of a program that Ctrl-C has ended, by convention."""
LAST_TAKEN_S: Final = 2.0
"""How long leaving waits for what was typed before to be stored."""
MOST_TYPED: Final = 100
"""Inputs that may wait for the store to take them."""


class Chat:
    """What the user does, done; the screen's Hands."""

    def __init__(
        self, harness: Harness, conversation: Conversation, screen: Screen, story: Story, catalogue: Catalogue
    ) -> None:
        self._harness = harness
        self._conversation = conversation
        self._screen = screen
        self._story = story
        self._catalogue = catalogue
        self._typed: asyncio.Queue[tuple[str, bool]] = asyncio.Queue(MOST_TYPED)
        self._left = asyncio.Event()
        self._interrupted_at: float | None = None
        self._interrupts: set[asyncio.Task[None]] = set()
        self._piped = False
        """Lines are answered one after the other, and nobody is there to type."""
        self.code = 0
        """What the program exits with."""

    # --- a person types ------------------------------------------------------------------------------------------

    async def attend(self, events: Events) -> None:
        """Show what happens and do what is typed, until the user leaves or the session ends."""
        tasks = [asyncio.create_task(work) for work in (self._follow(events), self._screen.read(self), self._work())]
        try:
            await self._until_left(tasks)
        finally:
            await _end([*tasks, *self._interrupts])
        for task in tasks:
            if not task.cancelled():
                task.result()

    async def _until_left(self, tasks: Sequence[asyncio.Task[None]]) -> None:
        """Or until one of the tasks has ended, which none does but by an error."""
        left = asyncio.create_task(self._wait_left())
        await asyncio.wait([*tasks, left], return_when=asyncio.FIRST_COMPLETED)
        if left.done() and not any(task.done() and task.exception() for task in tasks):
            # What was typed before is sent before.
            taken = asyncio.create_task(self._typed.join())
            await asyncio.wait([taken], timeout=LAST_TAKEN_S)
            await _end([taken])
        await _end([left])

    async def _wait_left(self) -> None:
        await self._left.wait()

    async def _follow(self, events: Events) -> None:
        try:
            async for event in events:
                self._story.tell(event)
                await self._screen.room()
                self._screen.refresh()
        except WatchEnded as ended:
            self._fail(ended)

    def _fail(self, ended: WatchEnded | SessionFailed) -> None:
        """The session is over, or the conversation is."""
        if isinstance(ended, WatchEnded) and ended.reason == "retired":
            self._screen.put(line("! the conversation was deleted", "error"))
            self.code = 1
            self.leave()
            return
        cause = ended.cause
        words = f"{type(cause).__name__}: {cause}" if cause is not None else str(ended)
        self._screen.put(line(f"! the session ended: {printable(words)}", "error"))
        self._screen.put(line("What was acknowledged is stored; start again to go on.", "dim"))
        self.code = 1
        self.leave()

    async def _work(self) -> None:
        while True:
            text, steer = await self._typed.get()
            await self._do(text, steer=steer)
            self._typed.task_done()
            if not self._story.busy:
                self._screen.ready()

    # --- lines of a pipe -----------------------------------------------------------------------------------------

    async def answer_lines(self, events: Events, first: str | None) -> None:
        """Answer one line after the other; what was under way before comes first."""
        self._piped = True
        reader = LineReader(0)
        work = asyncio.create_task(self._answer_lines(events, reader, first))
        left = asyncio.create_task(self._wait_left())
        try:
            await asyncio.wait([work, left], return_when=asyncio.FIRST_COMPLETED)
        finally:
            await _end([work, left, *self._interrupts])
        if not work.cancelled():
            work.result()

    async def _answer_lines(self, events: Events, reader: LineReader, first: str | None) -> None:
        try:
            await self._tell_until_idle(events, reader)
            text = first if first is not None else await whole_input(reader)
            while text is not None:
                submission = await self._do(text, steer=False)
                if submission is not None:
                    while not self._story.has_ended(submission.id) and not self._story.stuck:
                        if self._story.questions.first is not None and not await self._answered(reader):
                            return
                        await self._tell_next(events)
                    if await submission.status() != "done":
                        self.code = self.code or 1
                if self.code == INTERRUPTED or self._left.is_set():
                    return
                text = await whole_input(reader)
            await self._tell_until_idle(events, reader)
        except (WatchEnded, SessionFailed) as ended:
            self._fail(ended)

    async def _tell_until_idle(self, events: Events, reader: LineReader) -> None:
        """One run's end may be the next one's beginning: the conversation is asked, too."""
        while (self._story.busy or await self._conversation.busy()) and not self._story.stuck:
            if self._story.questions.first is not None and not await self._answered(reader):
                self.leave()
                return
            await self._tell_next(events)

    async def _answered(self, reader: LineReader) -> bool:
        """The next lines are about the call that waits, until one decides; False: there are no more."""
        question = self._story.questions.first
        while question is not None and self._story.questions.first is question:
            text = await whole_input(reader)
            if text is None:
                self._screen.put(line("Left while a call waits for your word; it still does.", "warning"))
                self.code = self.code or 1
                return False
            if reply_of(text) is None:
                self._screen.put(line("! a call waits for your word: y, n [why] or always", "error"))
            else:
                await self._do(text, steer=False)
        return True

    async def _tell_next(self, events: Events) -> None:
        self._story.tell(await anext(events))
        await self._screen.room()

    # --- the screen's hands --------------------------------------------------------------------------------------

    def typed(self, text: str, *, steer: bool) -> None:
        self._interrupted_at = None  # a Ctrl-C after this is about something else
        try:
            self._typed.put_nowait((text, steer))
        except asyncio.QueueFull:
            self._screen.put(line("! too much is typed at once; this was not taken: send it again", "error"))

    def interrupt(self) -> None:
        now = asyncio.get_running_loop().time()
        again = self._interrupted_at is not None and now - self._interrupted_at <= AGAIN_S
        self._interrupted_at = now
        if again:
            self.leave()
            return
        task = asyncio.create_task(self._interrupt())
        self._interrupts.add(task)
        task.add_done_callback(self._interrupts.discard)

    def leave(self) -> None:
        self._left.set()

    async def _interrupt(self) -> None:
        try:
            busy = not self._typed.empty() or await self._conversation.busy()
        except PerdureError:  # the session is over
            busy = False
        if self._piped:
            self.code = INTERRUPTED
        if busy:
            await self._abort()
        if self._piped or not busy:
            self.leave()

    # --- doing ---------------------------------------------------------------------------------------------------

    async def _do(self, text: str, *, steer: bool) -> Submission | None:
        """Do what was typed. What cannot be done is said, and changes nothing."""
        try:
            question, reply = self._story.questions.first, reply_of(text)
            if question is not None and reply is not None:
                self._screen.put(*await answer(self._harness, question, reply))
                self._story.questions.over(question.task)
                return None
            said = parse(text, steer=steer)
            if isinstance(said, Command):
                await self._command(said)
                return None
            if not said.text.strip():
                return None
            return await self._submit(said.text, steer=said.steer)
        except SessionFailed:
            if self._piped:
                raise
            return None  # whoever follows the events says it
        except (PerdureError, ValueError) as error:
            self._screen.put(line(f"! {printable(str(error))}", "error"))
            return None

    async def _submit(self, text: str, *, steer: bool) -> Submission:
        self._story.typed(text)
        try:
            submission = await self._conversation.submit(text, mode="steer" if steer else "follow_up")
            if await submission.status() == "queued":
                self._story.not_placed(text)
        except BaseException:
            self._story.not_placed(text)
            raise
        return submission

    async def _command(self, command: Command) -> None:
        match command.name:
            case "help":
                self._screen.put(*help_lines())
            case "name":
                await self._name(command.argument)
            case "model":
                await self._model(command.argument)
            case "thinking":
                await self._thinking(command.argument)
            case "compact":
                await self._conversation.compact(command.argument)
            case "reset":
                await self._conversation.reset(command.argument or None)
            case "abort":
                if await self._conversation.busy() or self._story.waiting_inputs:
                    await self._abort()
                else:
                    self._screen.put(line("Nothing runs.", "dim"))
            case "quit":
                self.leave()

    async def _name(self, name: str) -> None:
        if name:
            await self._conversation.set_name(name)
        found = (await self._conversation.info()).name
        self._screen.put(line(f"The conversation is named {printable(found)}." if found else "It has no name.", "dim"))

    async def _model(self, model: str) -> None:
        if model:
            name = self._catalogue.use(model)
            await self._conversation.set_agent(model=name)
        found = (await self._conversation.agent()).model or self._catalogue.default
        if found is None:
            raise CommandError("no model is chosen: /model provider:name")
        self._screen.put(line(f"From the next request on {printable(found)} is asked.", "dim"))

    async def _thinking(self, wanted: str) -> None:
        if wanted:
            await self._conversation.set_agent(thinking=level(wanted))
        found = (await self._conversation.agent()).thinking
        how = "as little as it can" if found == "off" else f"{found}, as far as it can"
        self._screen.put(line(f"From the next request on the model thinks {how}.", "dim"))

    async def _abort(self) -> None:
        self._story.stopping = True
        self._screen.refresh()
        try:
            await self._conversation.abort()
        except PerdureError as error:
            self._screen.put(line(f"! {printable(str(error))}", "error"))
        finally:
            self._story.stopping = False
            self._screen.refresh()


async def _end(tasks: Sequence[asyncio.Task[None]]) -> None:
    """Cancel them and wait until they have ended."""
    for task in tasks:
        task.cancel()
    if tasks:
        await asyncio.wait(tasks)
