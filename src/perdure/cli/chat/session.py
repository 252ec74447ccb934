"""A chat: one conversation between a screen and a harness."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import Any, Final

from perdure.cli.chat.commands import Command, help_lines, level, parse
from perdure.cli.chat.models import Catalogue
from perdure.cli.chat.questions import Asking, Question, Reply, answer_here, answer_line, chosen, decide_here, reply_of
from perdure.cli.chat.screen import Input, PlainScreen, Screen
from perdure.cli.chat.story import Story
from perdure.cli.errors import CommandError
from perdure.cli.style import line
from perdure.cli.text import printable
from perdure.events import Events
from perdure.harness.conversation import Conversation
from perdure.harness.harness import Harness
from perdure.harness.person import AnswerRefused
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
        self._typed: asyncio.Queue[tuple[str, bool, object]] = asyncio.Queue(MOST_TYPED)
        self._left = asyncio.Event()
        self._interrupted_at: float | None = None
        self._interrupts: set[asyncio.Task[None]] = set()
        self._news = asyncio.Event()
        """Something was told since it was last cleared."""
        self._reading: asyncio.Task[Input | None] | None = None
        self._failed = False
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
            self._screen.end_invitation()
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
                self._news.set()
                await self._screen.room()
                self._screen.refresh()
        except WatchEnded as ended:
            self._fail(ended)

    def _fail(self, ended: WatchEnded | SessionFailed) -> None:
        """The session is over, or the conversation is."""
        if self._failed:
            return
        self._failed = True
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
            text, steer, about = await self._typed.get()
            await self._do(text, steer=steer, about=about)
            self._typed.task_done()
            if not self._story.busy or self._screen.invited is not None:
                self._screen.ready()

    # --- lines of a pipe -----------------------------------------------------------------------------------------

    async def answer_lines(self, events: Events, first: str | None) -> None:
        """Answer one line after the other; what was under way before comes first."""
        self._piped = True
        follow = asyncio.create_task(self._follow(events))
        work = asyncio.create_task(self._answer_lines(first))
        left = asyncio.create_task(self._wait_left())
        try:
            await asyncio.wait([work, left], return_when=asyncio.FIRST_COMPLETED)
        finally:
            reading = [] if self._reading is None else [self._reading]
            self._screen.end_invitation()
            await _end([work, left, follow, *reading, *self._interrupts])
        for task in (work, follow):
            if not task.cancelled():
                task.result()

    async def _answer_lines(self, first: str | None) -> None:
        try:
            if not await self._until(self._idle):
                return
            text = first if first is not None else await self._next_text()
            while text is not None:
                submission = await self._do(text, steer=False)
                if submission is not None:
                    if not await self._until(partial(self._has_ended, submission.id)):
                        return
                    if await submission.status() != "done":
                        self.code = self.code or 1
                if self.code == INTERRUPTED or self._left.is_set():
                    return
                text = await self._next_text()
            await self._until(self._idle)
        except SessionFailed as ended:
            self._fail(ended)

    async def _has_ended(self, submission: int) -> bool:
        return self._story.has_ended(submission)

    async def _idle(self) -> bool:
        """One run's end may be the next one's beginning: the conversation is asked, too."""
        return not (self._story.busy or await self._conversation.busy())

    async def _until(self, true: Callable[[], Awaitable[bool]]) -> bool:
        """Whether it has become so, or the run is stuck; not if the user is asked something, and no line says what."""
        while True:
            self._news.clear()
            if await true() or self._story.stuck:
                return True
            first = self._story.questions.first
            if first is None:
                await self._news.wait()
                continue
            await self._screen.invitation()
            if not self._news.is_set() and not await self._hear(first):
                self.code = self.code or 1
                return False

    async def _hear(self, first: Question | Asking) -> bool:
        """The next line is about what is asked, unless that is over before; False: none is any more."""
        self._read()
        assert self._reading is not None, "it has just been begun"
        news = asyncio.create_task(self._wait_news())
        await asyncio.wait([self._reading, news], return_when=asyncio.FIRST_COMPLETED)
        await _end([news])
        if not self._reading.done():
            return True
        typed = await self._next_input()
        if typed is None:
            self._screen.put(line(_still(first), "warning"))
            return False
        about, command = typed.about, typed.text.startswith("/")
        if isinstance(first, Question):
            about = first  # a word is about a call, whenever it was written
            if reply_of(typed.text) is None and not command:
                self._screen.put(line("! a call waits for your word: y, n [why] or always", "error"))
                return True
        elif about != first and not command:
            words = "what the next line says was written before it was asked, and does not answer it"
            self._screen.put(line(f"{_left(first)}; {words}. /answer TEXT does.", "warning"))
            return False
        await self._do(typed.text, steer=False, about=about)
        return not self._left.is_set()

    def _read(self) -> None:
        assert isinstance(self._screen, PlainScreen), "one that redraws is for a terminal"
        if self._reading is None:
            self._reading = asyncio.create_task(self._screen.next_input())

    async def _next_input(self) -> Input | None:
        self._read()
        assert self._reading is not None, "it has just been begun"
        found = await self._reading
        self._reading = None
        return found

    async def _next_text(self) -> str | None:
        found = await self._next_input()
        return None if found is None else found.text

    async def _wait_news(self) -> None:
        await self._news.wait()

    # --- the screen's hands --------------------------------------------------------------------------------------

    def typed(self, text: str, *, steer: bool, about: object = None) -> None:
        self._interrupted_at = None  # a Ctrl-C after this is about something else
        try:
            self._typed.put_nowait((text, steer, about))
        except asyncio.QueueFull:
            self._screen.put(line("! too much is typed at once; this was not taken: send it again", "error"))

    def interrupt(self) -> None:
        now = asyncio.get_running_loop().time()
        again = self._interrupted_at is not None and now - self._interrupted_at <= AGAIN_S
        self._interrupted_at = now
        self._screen.interrupted()
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

    async def _do(self, text: str, *, steer: bool, about: object = None) -> Submission | None:
        """Do what was typed. What cannot be done is said, and changes nothing.

        ``about``: what was asked when it was begun.
        """
        try:
            said = parse(text, steer=steer)
            if isinstance(said, Command):
                await self._command(said, about)
                return None
            if not said.steer and await self._asked(text, said.text, about):
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

    # --- what is asked -------------------------------------------------------------------------------------------

    async def _asked(self, typed: str, text: str, about: object) -> bool:
        """Whether what was typed is about what is asked, or was; that is done."""
        reply, first = reply_of(typed), self._story.questions.first
        if isinstance(about, Asking):
            await self._answer(about, text)
            return True
        if isinstance(about, Question) and reply is not None:
            await self._decide(about, reply)
            return True
        if isinstance(first, Question) and about is None and reply is not None:
            words = f"! {printable(typed.strip())}: this was typed before the call could be read; type it again"
            self._screen.put(line(words, "error"))
            return True
        if isinstance(first, Asking) and about is None and text.strip():
            self._screen.put(line("  this was begun before the question could be read: it is an input", "dim"))
        return False

    async def _decide(self, question: Question, reply: Reply) -> None:
        if not self._story.questions.is_open(question):
            self._screen.put(line("! that call waits no more; nothing was decided by this", "error"))
            return
        self._screen.put(*await decide_here(self._harness, question, reply))
        self._story.questions.over(question.task)
        self._story.ask()

    async def _answer(self, asking: Asking, text: str) -> None:
        if not self._story.questions.is_open(asking):
            words = f"! question {asking.task} is not asked any more; what was typed was not sent"
            self._screen.put(line(words, "error"))
            return
        if not text.strip():
            self._screen.put(line(f"! nothing is no answer: {asking.how}", "error"))
            return
        value = chosen(asking.schema, text)
        try:
            first = await answer_here(self._harness, asking, value)
        except AnswerRefused as error:
            if error.reason != "does_not_fit":
                raise
            raise CommandError(f"that is no answer to question {asking.task}: it is {asking.shape}") from error
        if first:
            self._story.questions.answered_here(asking.task)
            self._screen.put(answer_line(value))
            self._story.ask()
        else:
            # That it is over will be told; it must not be asked until then.
            self._screen.put(line("! it was answered elsewhere already, and that answer stands", "error"))
            self._story.questions.answered_here(asking.task)
            self._story.ask()

    async def _answer_command(self, text: str, about: object) -> None:
        first = self._story.questions.first
        if not text:
            if self._story.questions.bring_back() == 0 and first is None:
                self._screen.put(line("Nothing is asked.", "dim"))
            self._story.ask()
        elif not isinstance(first, Asking):
            raise CommandError("no question is asked; /answer without a text asks those again that are for later")
        elif self._piped or about == first:
            await self._answer(first, text)
        else:
            raise CommandError("this was typed before the question could be read; type it again")

    def _later(self) -> None:
        asked = self._story.questions.set_aside()
        if asked is None:
            self._screen.put(line("Nothing is asked.", "dim"))
            return
        if self._piped:  # the next line is for after the run, which waits for the answer
            self._screen.put(line(_still(asked), "warning"))
            self.code = self.code or 1
            self.leave()
            return
        if isinstance(asked, Asking):
            how = f"perdure questions answer STORE {asked.task} ANSWER does from another terminal"
        else:
            how = f"perdure approvals allow STORE {asked.task} does from another terminal"
        self._screen.put(line(f"  for later: /answer asks again, and {how}", "dim"))
        self._story.ask()

    # --- inputs and commands -------------------------------------------------------------------------------------

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

    async def _command(self, command: Command, about: object) -> None:
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
            case "answer":
                await self._answer_command(command.argument, about)
            case "later":
                self._later()
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


def _left(asked: Question | Asking) -> str:
    if isinstance(asked, Question):
        return "Left while a call waits for your word"
    return f"Left while question {asked.task} waits for an answer"


def _still(asked: Question | Asking) -> str:
    return f"{_left(asked)}; it still does."


async def _end(tasks: Sequence[asyncio.Task[Any]]) -> None:
    """Cancel them and wait until they have ended."""
    for task in tasks:
        task.cancel()
    if tasks:
        await asyncio.wait(tasks)
