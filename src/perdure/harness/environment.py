"""Execution environments: where an agent's files live and its commands run, and how one takes part in a call.

A tool that is given an ExecutionEnvironment reads, writes and runs through it and knows nothing else of the
place. An environment whose files must stay equal to the log brings a CallScope, which the tool pipeline asks
at fixed places (rule H99). One call, in order, and what a scope does there:

1. the call is committed. Nothing is asked.
2. ``enter``: outside every transaction, so that it may wait: for its turn (one open call an environment,
   in the order of entering), for the environment to be reachable, and it may commit what somebody else
   changed in the files, in a commit of its own before the intent. What a tool prepares for its intent (the
   hash of a file, say) it prepares after this.
3. ``before_intent``: inside the intent's transaction. What it returns is stored with the intent (base state,
   generation, the attempt's nonce) and is ``call.scope_data`` from then on, also after a crash; it may stage
   documents in the same commit.
4. the tool runs on ``environment.for_call(call)``: commands are keyed by call, attempt and their ordinal,
   so a ledger can answer one that already ran instead of running it again.
5. ``capture``: outside every transaction, when the final result is known: freeze, collect and store what
   changed, which may take long. A change that cannot be kept is refused here, undone, and the refusal is the
   result.
6. ``before_result``: inside the one commit that holds the result; the change is staged there.
7. ``leave``: after that commit settled: clean up, thaw, hand over the turn.

After a crash between 3 and 6 the scope is asked ``recover`` before the tool's replay policy is looked at,
because it may know more: nothing ran (run under the same or a new attempt), it ran and its outcome can be
adopted (run the function again under the same attempt; its one command is answered from the ledger, output
from byte 0), it was undone (run under a new attempt, or interrupted), or the result itself. Whatever recovery
changes outside happens inside ``recover``, before the new attempt is committed, so a crash in it leads to the
same question again.

Where the environment goes away under a call with an intent, its operations, ``capture``, ``before_result`` or
``recover`` raise EnvironmentLost: the scope is asked ``recover`` in the same process then, without ``leave`` and
``enter`` in between.

A call without a stored intent is not asked about: nothing ran. Nested calls do not enter; they are part of
their outermost call's change and use its environment. Without a scope (LocalEnvironment) all of this is
skipped.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Literal, Protocol, TypeAlias

import msgspec

from perdure.kernel.errors import PerdureError

if TYPE_CHECKING:
    from perdure.kernel.json import JsonValue
    from perdure.kernel.session import Session
    from perdure.kernel.transaction import Transaction

# --- errors -------------------------------------------------------------------------------------------------


class FileError(PerdureError):
    """A file operation could not be done; nothing was changed. A tool may show it to the model as it is."""

    def __init__(self, path: str, reason: str) -> None:
        super().__init__(f"{path}: {reason}")
        self.path = path
        self.reason = reason


class PathEscapes(FileError):
    """The path leads out of the workspace, by ``..``, as an absolute path or through a symbolic link."""


class FileMissing(FileError):
    """Nothing is there."""


class NotAFile(FileError):
    """Something is there that is not a regular file: a directory, a pipe, a device."""


class FileTooLarge(FileError):
    """More bytes than this operation takes into memory at once; ask for a range."""


class FileChanged(FileError):
    """The file is not the one the caller expected to replace."""


class CommandNotStarted(PerdureError):
    """No process was made: the program or the directory is missing, or the arguments are too long."""


class NoSuchCommand(PerdureError):
    """No command in the background has this id, or not any more; or it is not for this process to stop."""


class ProcessesRemain(PerdureError):
    """Processes of a command outlived SIGKILL and a bounded wait. Nobody may call it stopped."""

    def __init__(self, pids: Sequence[int]) -> None:
        super().__init__(
            f"processes {', '.join(map(str, pids))} of a command are still there after SIGKILL; "
            "they are most likely stuck in the kernel (look at their state with ps)",
        )
        self.pids = tuple(pids)


class EnvironmentUnusable(PerdureError):
    """The environment cannot go on in this session. Never a tool result: the harness fails the session with
    it."""


class EnvironmentRefuses(PerdureError):
    """The environment cannot take the call now: raised by ``enter``. The call ends, before its intent, with these words
    for the model."""


class EnvironmentLost(PerdureError):
    """The environment went away under a call, and may be there again. Never a tool result: its scope is asked to
    ``recover`` the call, as after a crash."""


# --- files and commands -------------------------------------------------------------------------------------

FileKind: TypeAlias = Literal["file", "directory", "symlink", "other"]


class FileStat(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    """The last part of its path; behind symbolic links, of where they lead."""
    kind: FileKind
    size: int
    """Bytes."""
    mode: int
    """Permission bits."""
    modified_at: int
    """Milliseconds UTC."""


class Listing(msgspec.Struct, frozen=True, kw_only=True):
    entries: tuple[FileStat, ...]
    """By the bytes of their names. Symbolic links are not followed."""
    more: bool
    """There were more than the limit: they come behind these."""


class FoundPath(msgspec.Struct, frozen=True, kw_only=True):
    path: str
    """Relative to ``cwd``, or below the absolute path that was searched outside of it."""
    kind: FileKind
    size: int


class Found(msgspec.Struct, frozen=True, kw_only=True):
    entries: tuple[FoundPath, ...]
    """Depth first, in each directory by the bytes of the names."""
    more: bool
    """There were more than the limit, or than a message holds."""
    timed_out: bool = False
    """It took too long, and was ended: nothing is told of what there is."""


class GrepLine(msgspec.Struct, frozen=True, kw_only=True):
    path: str
    """As in FoundPath."""
    line: int
    """From 1."""
    text: str
    """Its first 1,000 bytes, without the line end; what is not UTF-8 is replaced."""
    context: bool = False
    """It does not match; it stands near a line that does."""


class GrepLines(msgspec.Struct, frozen=True, kw_only=True):
    lines: tuple[GrepLine, ...]
    """In the order of ``Found``, each line once."""
    more: bool
    timed_out: bool = False
    skipped: int = 0
    """Files that were not searched because they have more than 8 MiB or cannot be read, and binary files that match."""


class ExecResult(msgspec.Struct, frozen=True, kw_only=True):
    """How a command ended, and its output (stdout and stderr as one stream).

    Neither an exit code nor a signal: it ended, but how is not known.
    """

    exit_code: int | None
    """None if a signal ended it."""
    signal: int | None
    """The signal that ended it, or None."""
    timed_out: bool
    """The time-out passed and the command was stopped for it."""
    output_limit: bool = False
    """It wrote more than 256 MiB and was stopped for it."""
    duration_ms: int
    output: bytes
    """The whole output if it is small (64 KiB); of a larger one, its end."""
    output_bytes: int
    """How much there was."""
    output_path: str | None = None
    """Where a larger output was kept, for ``read_file``. It is reclaimed some time later."""
    output_kept: int = 0
    """How many bytes from the start ``output_path`` holds: fewer than there were if it met a bound or a full
    disk."""


BackgroundState: TypeAlias = Literal["running", "exited", "stopped", "lost"]
"""``stopped``: ended by somebody, or for its output. ``lost``: it runs no longer, and how it ended nobody knows."""


class BackgroundCommand(msgspec.Struct, frozen=True, kw_only=True):
    """A command that was started in the background, as it is now (rules H366 to H369)."""

    id: str
    command: str
    """Its first 200 characters."""
    state: BackgroundState
    exit_code: int | None = None
    """Of one that exited, if no signal ended it."""
    signal: int | None = None
    started_at: int
    """Milliseconds UTC."""
    output_bytes: int = 0
    """So far."""
    reason: str = ""
    """What stopped it, or why it is lost."""


class ExecutionEnvironment(Protocol):
    """Files below one root, and commands that run there.

    Paths are relative to ``cwd`` or absolute. Names that are not UTF-8 are str with surrogate escapes, as in
    ``os``. File operations raise FileError. Where an environment confines its paths, one that leads out
    raises PathEscapes, however it does; ``read_file`` and ``stat`` may also reach the outputs that ExecResult
    names.
    """

    @property
    def cwd(self) -> str:
        """The root of the workspace, absolute."""
        ...

    @property
    def scope(self) -> CallScope | None:
        """How this environment takes part in calls; None: it does not."""
        ...

    def for_call(self, call: OpenCall) -> ExecutionEnvironment:
        """The environment as one attempt of one call uses it. Its operations raise once that attempt has
        ended."""
        ...

    async def read_file(self, path: str, *, offset: int = 0, length: int | None = None) -> bytes:
        """Up to ``length`` bytes from ``offset``; without a length all that follow. Beyond the end: none."""
        ...

    async def write_file(self, path: str, data: bytes, *, mode: int | None = None, expect: str | None = None) -> None:
        """Replace or create a file, atomically: other readers see the old or the new content, a crash leaves
        one.

        Missing parents are made. A replaced file keeps its permission bits unless ``mode`` is given; a
        symbolic link is followed. ``expect`` is the SHA-256 (hexadecimal) of the content to be replaced:
        FileChanged if it differs.
        """
        ...

    async def stat(self, path: str) -> FileStat | None:
        """What is there, symbolic links followed; None if nothing is."""
        ...

    async def list_dir(self, path: str, *, limit: int = 10_000) -> Listing:
        """The names in a directory and what they are, at most ``limit``."""
        ...

    async def find(
        self,
        path: str = ".",
        *,
        pattern: str | None = None,
        kind: FileKind | None = None,
        ignored: bool = False,
        limit: int = 1000,
    ) -> Found:
        """What is below a directory, symbolic links not followed (rules H362 and H363).

        ``pattern``: a glob for the path below ``path``, or for the last name alone: ``*``, ``?`` and ``[...]`` stay
        within a name, ``**`` is any number of directories, ``{a,b}`` is either. ``ignored``: also ``.git`` and what
        ``.gitignore`` files name. ``limit`` is at most 10,000.
        """
        ...

    async def grep(
        self,
        pattern: str,
        *,
        path: str = ".",
        fixed: bool = False,
        ignore_case: bool = False,
        glob: str | None = None,
        context: int = 0,
        ignored: bool = False,
        limit: int = 100,
    ) -> GrepLines:
        """The lines that a regular expression (Python's ``re``, on bytes) fits, in one file or in all below a
        directory.

        ``fixed``: the pattern is a text. ``glob``: only files that it fits, as in ``find``. ``context``: lines around
        each match, at most 20. ``limit``: matches, at most 1,000. Raises FileError also for a pattern that is none.
        """
        ...

    async def remove(self, path: str) -> None:
        """Remove a file, a symbolic link itself, or an empty directory."""
        ...

    async def exec(
        self,
        command: str | Sequence[str],
        *,
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        timeout_ms: int | None = None,
        on_output: Callable[[bytes], None] | None = None,
    ) -> ExecResult:
        """Run a shell command (str) or a program with its arguments, until it has ended.

        ``env`` adds to the environment's variables. ``on_output`` gets the whole output from byte 0, each
        byte once, in order, in chunks of no meaning. Cancelling the call stops the command; it returns when
        nothing of it is left. Raises CommandNotStarted, and ProcessesRemain when it could not be stopped.
        """
        ...

    async def start_background(self, command: str) -> BackgroundCommand:
        """Run a shell command and return while it runs. At most 8 run at once, and one that writes more than 64 MiB is
        stopped. Raises CommandNotStarted."""
        ...

    async def background(self) -> tuple[BackgroundCommand, ...]:
        """Those that run and those of the last 32 that do not, the oldest first; of earlier processes too."""
        ...

    async def read_background(
        self, id: str, *, offset: int = 0, length: int = 0, wait_ms: int = 0, until_exit: bool = False
    ) -> tuple[BackgroundCommand, bytes]:
        """How a command is, and its output from ``offset``, at most ``length`` bytes (1 MiB).

        While it runs, up to ``wait_ms`` (10 minutes) are waited for output past ``offset``, or with ``until_exit`` for
        its end. Raises NoSuchCommand.
        """
        ...

    async def stop_background(self, id: str) -> BackgroundCommand:
        """End it and all it left; one that has ended stays what it is. Raises NoSuchCommand, ProcessesRemain."""
        ...

    async def end_background(self) -> None:
        """The session that used this environment closes: what must not outlive it is ended."""
        ...


# --- taking part in calls -----------------------------------------------------------------------------------

Effects: TypeAlias = Literal["read", "space", "world"]
"""What a tool changes: nothing; only files and processes of its environment; or anything else, too."""


class OpenCall(Protocol):
    """A call as a scope sees it. ``id`` is its identity; the values are those of its present attempt."""

    @property
    def id(self) -> int: ...
    @property
    def conversation_id(self) -> int: ...
    @property
    def name(self) -> str: ...
    @property
    def arguments(self) -> JsonValue:
        """As the intent stores them."""
        ...

    @property
    def idempotency_key(self) -> str:
        """Unique in the world, the same in every attempt."""
        ...

    @property
    def attempt(self) -> int:
        """1, and one more each time an intent is committed anew."""
        ...

    @property
    def scope_data(self) -> JsonValue:
        """What ``before_intent`` returned for this attempt; None before it."""
        ...

    @property
    def replay_safe(self) -> bool:
        """The stored and the current replay policy both say safe."""
        ...

    @property
    def effects(self) -> Effects:
        """What the tool declares of this call."""
        ...

    @property
    def adoptable(self) -> bool:
        """The tool declares that its result is a pure function of the exit and output of its one command."""
        ...

    @property
    def abort_requested(self) -> bool:
        """The call is being aborted: it may be undone or keep its effects, and is never run again."""
        ...


class ScopeResult(msgspec.Struct, frozen=True, kw_only=True):
    """A result that a scope decides in place of the tool."""

    text: str
    is_error: bool
    details: msgspec.Raw | None = None


class CallOutcome(Protocol):
    """A call's result as a scope sees it."""

    @property
    def is_error(self) -> bool: ...

    @property
    def code(self) -> str | None:
        """The code of an error the harness wrote (``interrupted``, ``aborted``, ...), or None."""
        ...


class RecoverRun(msgspec.Struct, frozen=True):
    """Run the tool's function: under the stored intent, or under a new one that is committed first."""

    attempt: Literal["same", "next"]


class RecoverResult(msgspec.Struct, frozen=True):
    """The call is over with this result; it is committed, nothing runs."""

    result: ScopeResult


class RecoverInterrupted(msgspec.Struct, frozen=True):
    """Nothing of the call is left in the environment; it ends interrupted, or aborted if it is being so."""

    reason: str = ""
    """For the model, beside the code."""


Recovery: TypeAlias = RecoverRun | RecoverResult | RecoverInterrupted


class CallScope(Protocol):
    """An environment's part in the calls that use it. See the module's text for the order.

    Any method may raise EnvironmentUnusable or StaleEpochError: the session fails with it and nothing is
    written; neither is ever recorded as a result. EnvironmentLost has the call entered again before its intent, and
    recovered after it, some times before the session fails; raised by ``leave`` it changes nothing (rule H187).
    Another exception faults the call's task. Every method may be cancelled and be asked again with the same
    arguments.
    """

    async def attach(self, session: Session, open_calls: Sequence[OpenCall]) -> None:
        """Before anything else is asked in a session, after its fence commit has settled and before work
        starts.

        ``open_calls``: every call of this environment that has a stored intent and no result, by intent.
        """
        ...

    async def detach(self) -> None:
        """The session is closing or has failed; nothing more is asked. Open calls stay open in the log."""
        ...

    async def enter(self, call: OpenCall) -> None:
        """Wait until the call may have its intent. Not called again when a recovered call runs: it holds its
        turn."""
        ...

    async def before_intent(self, tx: Transaction, call: OpenCall) -> JsonValue:
        """Stage what belongs into the intent's commit; the value is stored with the intent."""
        ...

    async def capture(self, call: OpenCall, outcome: CallOutcome) -> ScopeResult | None:
        """The function has ended, also by an error or an abort. A result replaces the outcome: it is then
        final."""
        ...

    async def before_result(self, tx: Transaction, call: OpenCall, outcome: CallOutcome) -> None:
        """Stage what belongs into the outcome's commit; for every call with an intent, however it ended."""
        ...

    async def leave(self, call: OpenCall, *, outcome: bool) -> None:
        """The call no longer runs here.

        ``outcome``: its outcome has settled; else it never got an intent, or stays open in the log because
        the session ends.
        """
        ...

    async def recover(self, call: OpenCall) -> Recovery:
        """The call has an intent and no outcome, and its function does not run: what now? May wait and may
        commit."""
        ...
