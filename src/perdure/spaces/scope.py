"""A Space's part in the calls that use it: its workspace stays equal to the log through any crash (rules S130 to S162).

What is asked here, when, and in which order, is told in ``perdure.harness.environment``. One call that may change
something has the Space at a time, from its intent to its outcome (``Turns``). The driver takes the Space when the first
call needs it (``Hold``), and again whenever the connection was lost.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Generator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any, Final, TypeVar, cast
from weakref import WeakKeyDictionary

import msgspec

from perdure.harness.environment import (
    CallOutcome,
    EnvironmentLost,
    OpenCall,
    RecoverInterrupted,
    RecoverRun,
    Recovery,
    ScopeResult,
)
from perdure.kernel.errors import StaleEpochError
from perdure.kernel.json import JsonValue
from perdure.kernel.reports import Report
from perdure.kernel.session import Session, Settled
from perdure.kernel.transaction import Transaction
from perdure.spaces import image
from perdure.spaces.background import key_of
from perdure.spaces.capture import Captured, UnfitForImage, capture
from perdure.spaces.client import SpaceClient
from perdure.spaces.documents import (
    KEPT_BACKGROUND,
    KEPT_RECOVERIES,
    BackgroundNote,
    OpenIntent,
    RecoveryKind,
    RecoveryNote,
    SpaceImage,
    SpaceState,
)
from perdure.spaces.environment import CallOver, until_ended
from perdure.spaces.errors import (
    ContentChanged,
    ScanForgotten,
    SpaceConnectionLost,
    SpaceFull,
    SpaceProcessesRemain,
    SpaceRefused,
    SpaceTooLarge,
    SpaceUnavailable,
)
from perdure.spaces.hold import Hold
from perdure.spaces.image import Tree
from perdure.spaces.provider import SpaceProvider
from perdure.spaces.reclaim import Reclaiming
from perdure.spaces.recovery import Decision, Stand, decide, reason
from perdure.spaces.restore import restore
from perdure.spaces.settings import SpaceSettings
from perdure.spaces.turns import Turns
from perdure.spaces.wire import Advanced, ExecKey, ImageName, Place, Restored

T = TypeVar("T")

_TRIES = 6
"""So often in a row a lost connection is made anew for one thing."""
_ATTACHED: Final[WeakKeyDictionary[Session, set[str]]] = WeakKeyDictionary()
"""The names of the Spaces of each session: what two scopes of one did would not be in turn."""


@dataclass(slots=True)
class _Note:
    kind: RecoveryKind
    why: str


class SpaceScope:
    """Made once a Space and host; attached to one session at a time."""

    def __init__(self, provider: SpaceProvider, name: str, settings: SpaceSettings) -> None:
        self._provider = provider
        self._name = name
        self._settings = settings
        self._session: Session | None = None
        self._hold: Hold | None = None
        self._reclaiming: Reclaiming | None = None
        self._turns = Turns()
        self._taking = asyncio.Lock()
        self._captured: dict[int, Captured] = {}
        """Of calls whose outcome is not committed yet."""
        self._intents: dict[int, OpenIntent] = {}
        """Of the calls that are open in this process."""
        self._lost: dict[int, EnvironmentLost | StaleEpochError] = {}
        """Calls under which the Space was lost, or refused this driver."""
        self._over: set[int] = set()
        """Calls whose function has ended; what it left running does nothing more."""
        self._notes: dict[int, _Note] = {}
        """How open calls go on, until it is committed with their outcome or next intent."""
        self._background: dict[int, list[BackgroundNote]] = {}
        """What open calls put in the background, until it is committed with their outcome."""
        self._settled: dict[int, tuple[ImageName, int | None]] = {}
        """Of calls whose outcome is committed: its image, and the scan that this was taken with."""
        self._lasting = False
        """Something may run in the background: what is compared is frozen meanwhile."""

    # --- what the environment asks -----------------------------------------------------------------------------

    @property
    def client(self) -> SpaceClient:
        """Raises SpaceConnectionLost while this driver does not have the Space."""
        client = None if self._hold is None else self._hold.client
        if client is None or client.admission is None:
            raise SpaceConnectionLost("not_advanced", f"the Space {self._name} is not taken")
        return client

    def check_turn(self, call: OpenCall) -> None:
        """Raises CallOver once the call's function, or its turn, has ended (rule S114)."""
        if call.id in self._over or not self._turns.has(call.id) or self._passed(call):
            raise CallOver("the call this environment belongs to has ended")

    def _passed(self, call: OpenCall) -> bool:
        """Whether a later attempt of the call is under way."""
        intent = self._intents.get(call.id)
        return intent is not None and intent.attempt != call.attempt

    def intent(self, call: OpenCall) -> OpenIntent:
        """The intent of the call's present attempt. Raises SpaceConnectionLost while there is none."""
        intent = self._intents.get(call.id)
        if intent is None or intent.attempt != call.attempt:
            raise SpaceConnectionLost("not_advanced", "the attempt has no intent yet")
        return intent

    @contextmanager
    def noting(self, call: OpenCall) -> Generator[None]:
        """What says that the driver lost the Space is noted, so that no tool can make a result of it (rule S160)."""
        try:
            yield
        except (EnvironmentLost, StaleEpochError) as error:
            if not self._passed(call):
                self._lost[call.id] = error
            raise

    @property
    def ending(self) -> bool:
        """Whether the session ends: what runs is left to whoever recovers it."""
        session = self._session
        return session is None or session.closing or session.failed is not None

    async def background(self, call: OpenCall) -> Sequence[BackgroundNote]:
        """The commands in the background that the log knows, and those of this call."""
        return (*await self._logged_background(), *self._background.get(call.id, ()))

    def put_in_background(self, call: OpenCall, note: BackgroundNote) -> None:
        self._lasting = True
        self._background.setdefault(call.id, []).append(note)

    async def _logged_background(self) -> Sequence[BackgroundNote]:
        state = await self._bound().snapshot(SpaceState, key=self._name)
        return () if state is None else state.background

    async def _take(self, open_call: Sequence[ExecKey]) -> Advanced:
        """Take the Space. What runs in it by the log goes on, for this driver; all else is gone (rule S169)."""
        keep = [*open_call, *(key_of(note) for note in await self._logged_background())]
        advanced = await self._held().take(keep=keep)
        self._lasting = any(command.state == "running" for command in advanced.commands)
        return advanced

    def _of_calls(self) -> Sequence[dict[int, Any]]:  # Any: each has values of its own
        return self._captured, self._intents, self._lost, self._notes, self._settled, self._background

    # --- beginning and end -------------------------------------------------------------------------------------

    async def attach(self, session: Session, open_calls: Sequence[OpenCall]) -> None:
        if self._session is not None:
            raise SpaceUnavailable(
                f"this environment of the Space {self._name} is that of another open session; make one for each with "
                "durable_space()"
            )
        names = _ATTACHED.setdefault(session, set())
        if self._name in names:
            raise SpaceUnavailable(
                f"two environments of the Space {self._name} are used in one session; make one with durable_space(), "
                "and supply that to each conversation of this Space"
            )
        names.add(self._name)
        self._session = session
        self._hold = Hold(session, self._provider, self._name)
        self._reclaiming = Reclaiming(session)
        session.observe(self._observe)
        self._turns = Turns()
        for kept in (*self._of_calls(), self._over):
            kept.clear()
        self._lasting = False
        # By what was stored: what a tool declares, and which Space a conversation has, may be otherwise by now.
        state = await session.snapshot(SpaceState, key=self._name)
        changing = None if state is None or state.open is None else state.open.call
        for call in open_calls:
            await self._turns.take(call.id, shared=call.id != changing)

    def _observe(self, settled: Settled) -> None:
        """A call whose end was written without this scope being asked, such as one that was given up while nothing of
        it ran, has its turn no longer. What it left is undone before the next call."""
        for record in settled.batch.tasks:
            if not record.live and record.id not in self._settled and self._turns.has(record.id):
                self._turns.give(record.id)

    async def detach(self) -> None:
        if self._session is not None:
            _ATTACHED[self._session].discard(self._name)
        hold, self._hold, self._session = self._hold, None, None
        if self._reclaiming is not None:
            await self._reclaiming.stop()
        if hold is not None:
            await hold.close()

    # --- a call ------------------------------------------------------------------------------------------------

    def _only_reads(self, call: OpenCall) -> bool:
        """It shares its turn, and has nothing of its own in the Space."""
        return not self._turns.alone(call.id)

    async def enter(self, call: OpenCall) -> None:
        await self._turns.take(call.id, shared=call.effects == "read")
        try:
            await self._persist(lambda: self._make_ready(call))
        except BaseException:
            self._turns.give(call.id)
            raise

    async def _make_ready(self, call: OpenCall) -> None:
        try:
            await (self._take_up(call) if self._only_reads(call) else self._take_in(call))
        except (SpaceFull, SpaceTooLarge) as error:
            raise UnfitForImage(f"the Space {self._name} cannot be used now: {error}") from error

    async def before_intent(self, tx: Transaction, call: OpenCall) -> JsonValue:
        if self._only_reads(call):
            return None
        hold = self._held()
        state = await tx.draft(SpaceState, key=self._name)
        if state.open is None or (state.open.call, state.open.number) != (call.id, state.calls):
            state.calls += 1
        self._background.pop(call.id, None)
        intent = OpenIntent(
            call=call.id,
            number=state.calls,
            attempt=call.attempt,
            nonce=tx.session.entropy.token(),
            generation=hold.generation,
            boot=hold.boot,
            image=state.image,
            image_nonce=state.image_nonce,
        )
        state.open = intent
        self._intents[call.id] = intent
        self._write_note(tx, state, call)
        return cast("JsonValue", msgspec.to_builtins(intent))

    async def capture(self, call: OpenCall, outcome: CallOutcome) -> ScopeResult | None:
        self._over.add(call.id)
        if call.id in self._lost:
            raise self._lost.pop(call.id)
        if self._only_reads(call):
            return None
        try:
            self._captured[call.id] = await self._capture(pin=call.id, freeze=True, sync=True)
        except (UnfitForImage, SpaceFull, SpaceTooLarge) as error:
            await self._undo(call)  # once: if the Space is lost in it, the call is recovered
            self._note(call, "restored", str(error), error)
            return ScopeResult(text=f"{error}. What the call did in the workspace was undone.", is_error=True)
        return None

    async def before_result(self, tx: Transaction, call: OpenCall, outcome: CallOutcome) -> None:
        if self._only_reads(call):
            return
        captured = self._captured.pop(call.id, None)
        state = await tx.draft(SpaceState, key=self._name)
        if captured is not None and captured.changes:
            await self._stage(tx, state, captured)
        if captured is not None and (started := self._background.get(call.id)):
            state.background.extend(started)
            del state.background[:-KEPT_BACKGROUND]
        note = self._notes.get(call.id)
        if outcome.code == "interrupted" and (note is None or note.kind != "interrupted"):
            self._note(call, "interrupted", "it could not be run again" if note is None else note.why)
        self._write_note(tx, state, call)
        state.open = None
        tx.unpin_contents(call.id)
        self._settled[call.id] = self._name_of(state), None if captured is None else captured.scan
        self._over.add(call.id)

    async def leave(self, call: OpenCall, *, outcome: bool) -> None:
        try:
            if outcome and call.id in self._settled and self._bound().failed is None:
                # Also in a session that closes now: else what others change until the next would be taken back.
                settling = asyncio.ensure_future(self._settle(call))
                cancelled = await until_ended(settling)
                settling.result()
                if cancelled is not None:
                    raise cancelled
        except (SpaceConnectionLost, SpaceRefused):
            pass  # whoever takes the Space next finds that its image record is not the log's, and restores it
        finally:
            for kept in self._of_calls():
                kept.pop(call.id, None)
            self._over.discard(call.id)
            self._turns.give(call.id)

    async def _settle(self, call: OpenCall) -> None:
        """The Space stands at the image of the outcome; its keys are forgotten, what lives in it goes on."""
        name, scan = self._settled[call.id]
        stand = await self.client.settle(
            commit=name.commit, nonce=name.nonce, scan=scan, floor=self._above(call), thaw=True
        )
        self._held().image = stand.image
        if self._reclaiming is not None and not self.ending:
            self._reclaiming.image_made()

    # --- recovery ----------------------------------------------------------------------------------------------

    async def recover(self, call: OpenCall) -> Recovery:
        self._over.discard(call.id)
        self._background.pop(call.id, None)
        lost = self._lost.pop(call.id, None)
        if not self._only_reads(call):
            # Where its tool asked for another command than the one that is there, none of it can be adopted.
            conflict = isinstance(lost, SpaceConnectionLost) and lost.reason == "conflict"
            return await self._persist(lambda: self._recover(call, adoptable=call.adoptable and not conflict))
        if call.effects != "read" or call.scope_data is not None:
            return RecoverInterrupted("Its tool or its Space is another by now.")
        await self._persist(lambda: self._take_up(call))
        return RecoverRun("same")

    async def _recover(self, call: OpenCall, *, adoptable: bool) -> Recovery:
        intent = self._intents[call.id] = msgspec.convert(call.scope_data, OpenIntent)
        adoptable = adoptable and not call.abort_requested
        key = ExecKey(call=intent.number, attempt=intent.attempt, nonce=intent.nonce, ordinal=1)
        hold = self._held()
        advanced = await self._take([key] if adoptable else [])
        for _ in range(_TRIES):
            looked = await self.client.look([key])
            stand = Stand(
                log=self._bound().info.log_id,
                generation=hold.generation,
                boot=hold.boot,
                image=looked.image,
                floor=looked.floor,
                command=looked.commands[0].state,
            )
            decision = decide(intent, stand, adoptable=adoptable)
            if decision != "void":
                return await self._go_on(call, decision, reason(decision, stand))
            await self.client.void(key)
        raise SpaceUnavailable(f"the command of call {call.id} can neither be voided nor found ({advanced.instance})")

    async def _go_on(self, call: OpenCall, decision: Decision, why: str) -> Recovery:
        match decision:
            case "reattach":
                self._note(call, "reattached", why)
                return RecoverRun("same")
            case "adopt":
                self._note(call, "adopted", why)
                return RecoverRun("same")
            case "again" if not call.abort_requested:
                self._note(call, "not_started", why)
                return RecoverRun("next")
            case _:
                await self._undo(call)
                if decision == "restore":
                    await self._tell_restored(why)
        if call.abort_requested or not self._may_rerun(call):
            self._note(call, "interrupted", f"{why}; undone")
            return RecoverInterrupted("What it did in the workspace was undone.")
        self._note(call, "rerun", f"{why}; undone")
        return RecoverRun("next")

    def _may_rerun(self, call: OpenCall) -> bool:
        """What an undone call did is gone, so whether it may run again is up to the Space; what it did elsewhere is
        not (rule S159)."""
        if call.effects == "space":
            return self._settings.rerun == "rerun" or call.replay_safe
        return call.replay_safe

    async def _undo(self, call: OpenCall) -> None:
        """The workspace is the call's base image again; nothing of this attempt runs or ever starts."""
        try:
            await self._restore(floor=self._above(call))
        except SpaceRefused as error:
            raise SpaceUnavailable(f"the Space {self._name} cannot be undone: {error}") from error
        self._captured.pop(call.id, None)

    def _above(self, call: OpenCall) -> Place:
        """The floor that this attempt of the call is below."""
        intent = self.intent(call)
        return Place(call=intent.number, attempt=intent.attempt + 1)

    # --- the Space between calls -------------------------------------------------------------------------------

    async def _take_up(self, call: OpenCall) -> None:
        """The Space is this driver's, and stands at the log's image but for what others changed since. Calls that only
        read may ask for that at once: one of them does it."""
        async with self._taking:
            await self._take_up_alone(call)

    async def _take_up_alone(self, call: OpenCall) -> None:
        hold = self._held()
        if not hold.taken:
            await self._take([])
            if self._lasting:
                await self.client.thaw()  # The driver before may have ended while it captured.
        _, name = await self._image()
        record = hold.image
        left = await self._left_open()
        if name.commit == 0:
            await self._take_over(call)
        elif left is not None:
            await self._restore(floor=Place(call=left.number, attempt=left.attempt + 1))
            await self._tell_restored("a call had ended without a result of it")
            async with self._bound().commit() as tx:
                (await tx.draft(SpaceState, key=self._name)).open = None
        elif record is None or record.name != name:
            await self._restore(floor=None)
            await self._tell_restored("it did not stand at the image of the log")

    async def _left_open(self) -> OpenIntent | None:
        """The intent of a call that ended without this scope: nobody goes on with it."""
        state = await self._bound().snapshot(SpaceState, key=self._name)
        return None if state is None or state.open is None or self._turns.has(state.open.call) else state.open

    async def _take_in(self, call: OpenCall) -> None:
        """That, and what others changed is the log's next image (rule S145)."""
        await self._take_up(call)
        await self._take_over(call)

    async def _take_over(self, call: OpenCall) -> None:
        """Commit what the workspace is now, if it is not the log's image, and let the Space stand at that."""
        try:
            await self._take_over_still(call, freeze=self._lasting)
        finally:
            if self._lasting:
                with suppress(SpaceConnectionLost, SpaceRefused):  # Whoever takes the Space next thaws.
                    await self.client.thaw()

    async def _take_over_still(self, call: OpenCall, *, freeze: bool) -> None:
        """The call pins the contents meanwhile."""
        session, hold = self._bound(), self._held()
        _, name = await self._image()
        captured = await self._capture(pin=call.id, freeze=freeze, sync=name.commit == 0)
        if captured.changes and name.commit:
            captured = await self._capture(pin=call.id, freeze=freeze, sync=True)
        if captured.changes or name.commit == 0:
            async with session.commit() as tx:
                state = await tx.draft(SpaceState, key=self._name)
                await self._stage(tx, state, captured)
                state.external += 1
                name = self._name_of(state)
                tx.unpin_contents(call.id)
        elif hold.image is not None and hold.image.boot == hold.boot:
            return
        stand = await self.client.settle(commit=name.commit, nonce=name.nonce, scan=captured.scan)
        hold.image = stand.image

    async def _capture(self, *, pin: int, freeze: bool, sync: bool) -> Captured:
        """Raises UnfitForImage, also for a workspace that does not hold still."""
        tree, name = await self._image()
        for _ in range(_TRIES):
            try:
                return await capture(
                    self.client,
                    self._bound(),
                    tree,
                    name=name,
                    pin=pin,
                    max_file_bytes=self._settings.max_file_bytes,
                    freeze=freeze,
                    sync=sync,
                )
            except (ContentChanged, ScanForgotten):
                continue
            except SpaceProcessesRemain as error:
                raise UnfitForImage(f"the workspace cannot be kept: {error}") from error
        raise UnfitForImage("the workspace cannot be kept: something goes on changing files while they are read")

    async def _restore(self, *, floor: Place | None) -> Restored:
        session, hold = self._bound(), self._held()
        tree, image_name = await self._image()
        name = f"{self._name}-{session.clock.wall()}-{session.entropy.token()[:8]}"
        done = await restore(
            self.client,
            session,
            tree,
            image_name=image_name,
            floor=floor,
            preserve_bytes=self._settings.preserve_bytes,
            name=name,
        )
        hold.image = done.image
        if done.preserved or done.not_preserved:
            self._tell_preserved(done)
        return done

    async def _tell_restored(self, why: str) -> None:
        """The workspace is the log's image again, and not what it was found to be; a call may have nothing to do with
        that."""
        session = self._bound()
        session.report(Report(type="space_restored", message=f"Space {self._name}: {why}"))
        async with session.commit() as tx:
            state = await tx.draft(SpaceState, key=self._name)
            _keep(state, RecoveryNote(kind="restored", call=None, attempt=0, at=tx.at, why=why))

    def _tell_preserved(self, done: Restored) -> None:
        kept = f"{done.preserved} files that the log did not have were moved to {done.recovery}"
        if done.not_preserved_count:
            kept += f"; {done.not_preserved_count} did not fit and are gone"
        self._bound().report(Report(type="space_recovery", message=f"Space {self._name}: {kept}"))

    # --- the log -----------------------------------------------------------------------------------------------

    async def _image(self) -> tuple[Tree, ImageName]:
        """The log's image and its name; number 0: there is none yet."""
        session = self._bound()
        state = await session.snapshot(SpaceState, key=self._name)
        found = await session.snapshot(SpaceImage, key=self._name)
        tree: Tree = {}
        if found is not None:
            plain = found.shared_json()
            assert isinstance(plain, dict), "a document is an object"
            tree = cast("Tree", plain["dirs"])
        return tree, self._name_of(state or SpaceState())

    async def _stage(self, tx: Transaction, state: SpaceState, captured: Captured) -> None:
        """The next image of the log."""
        captured.stage(tx)
        kept = await tx.draft(SpaceImage, key=self._name)
        image.apply(kept.dirs, captured.changes)
        state.image += 1
        state.image_nonce = tx.session.entropy.token()

    def _name_of(self, state: SpaceState) -> ImageName:
        return ImageName(log=self._bound().info.log_id, commit=state.image, nonce=state.image_nonce)

    def _note(self, call: OpenCall, kind: RecoveryKind, why: str, error: Exception | None = None) -> None:
        """``error``: what ``why`` quotes; names of files may be in it, which no report's message has (rule H285)."""
        self._notes[call.id] = _Note(kind, why)
        said = why if error is None else "what it left in the workspace cannot be kept"
        self._bound().report(
            Report(
                type=f"call_{kind}",
                message=f"{call.name}: {said}",
                task=call.id,
                conversation=call.conversation_id,
                error=error,
            )
        )

    def _write_note(self, tx: Transaction, state: SpaceState, call: OpenCall) -> None:
        """How the call went on is in the commit that lets it: its result's, or its next attempt's intent."""
        note = self._notes.pop(call.id, None)
        if note is None:
            return
        _keep(state, RecoveryNote(kind=note.kind, call=call.id, attempt=call.attempt, at=tx.at, why=note.why))

    # --- parts -------------------------------------------------------------------------------------------------

    def _bound(self) -> Session:
        if self._session is None:
            raise SpaceUnavailable(f"the Space {self._name} is not attached to an open session")
        return self._session

    def _held(self) -> Hold:
        assert self._hold is not None, "attach comes first"
        return self._hold

    async def _persist(self, work: Callable[[], Awaitable[T]]) -> T:
        """Do it, and again whenever the connection is lost: each step looks at what is there. Raises
        SpaceUnavailable."""
        lost: EnvironmentLost | None = None
        for attempt in range(_TRIES):
            if attempt:
                await self._bound().clock.sleep(min(0.05 * 2**attempt, 1.0))
            try:
                return await work()
            except SpaceConnectionLost as error:
                lost = error
            except SpaceRefused as error:
                raise SpaceUnavailable(f"the Space {self._name} cannot be used: {error}") from error
        raise SpaceUnavailable(f"the Space {self._name} was lost {_TRIES} times in a row, at last: {lost}") from lost


def _keep(state: SpaceState, note: RecoveryNote) -> None:
    state.recoveries.append(note)
    del state.recoveries[:-KEPT_RECOVERIES]
