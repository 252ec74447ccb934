"""Every error the kernel raises by name; floors above add their own beside their concept.

An error says what was wrong, where, and what to do. None carries document contents, prompts or secrets.
"""

from __future__ import annotations


class PerdureError(Exception):
    """The base of every error this package raises on purpose."""


class NotJson(PerdureError, ValueError):
    """A value that is not strict JSON was about to be stored (rule K35)."""

    def __init__(self, path: str, reason: str) -> None:
        super().__init__(f"{path}: {reason}")
        self.path = path
        self.reason = reason


class SessionFailed(PerdureError):
    """Storage refused or lost something, so this session stopped; reopen the store to go on.

    ``cause`` is the first error. What was acknowledged before it is stored; a call that raised this may or
    may not have committed: repeat it with the same request id after reopening.
    """

    def __init__(self, cause: BaseException) -> None:
        super().__init__(
            f"the session failed and must be reopened: {type(cause).__name__}: {cause}",
        )
        self.cause = cause


class SessionClosed(PerdureError):
    """The session is closing or closed; nothing new is admitted."""


class InsideTransaction(PerdureError):
    """A session call was awaited from inside the same task's own open transaction; it would wait for itself."""


class TransactionClosed(PerdureError):
    """A transaction, or something read through it, was used after its block ended."""


class NotFound(PerdureError, LookupError):
    """No record of that kind has this id."""


class InvalidTransition(PerdureError, ValueError):
    """A record was asked to move in a way its lifecycle does not allow."""


class ConversationOpen(PerdureError):
    """A conversation was to be deleted that is not closed: something in it, or in what it owns, is live (rule K193)."""

    def __init__(self, conversation: int, live: str) -> None:
        super().__init__(f"conversation {conversation} cannot be deleted: {live}; end or abort that first")
        self.conversation = conversation


class TooLarge(PerdureError, ValueError):
    """One record, or one write of a document, is larger than a store takes; nothing of its transaction was stored."""

    def __init__(self, what: str, size: int, limit: int) -> None:
        super().__init__(
            f"{what} would take {size:,} bytes, more than the {limit:,} a record may; "
            "keep large content in a file and store its path"
        )
        self.size = size
        self.limit = limit


class RequestConflict(PerdureError):
    """The request id is taken in this conversation by a submission with other content."""

    def __init__(self, request_id: str, submission: int) -> None:
        super().__init__(
            f"request id {request_id!r} already belongs to submission {submission} with other content; "
            "use a new request id for new content",
        )
        self.request_id = request_id
        self.submission = submission


class DraftClosed(TransactionClosed):
    """A draft was used after the transaction that opened it ended."""


class DraftDetached(PerdureError):
    """A handle into a draft whose object was removed or replaced."""


class OperationError(PerdureError, ValueError):
    """An operation does not fit the value it is applied to."""

    def __init__(self, path: str, reason: str) -> None:
        super().__init__(f"{path}: {reason}")
        self.path = path
        self.reason = reason


class DocumentVersionError(PerdureError):
    """A stored document cannot be read by this code: it is newer, or no migration leads to this version."""

    def __init__(self, kind: str, stored: int, code: int, reason: str) -> None:
        super().__init__(f"document {kind!r} is stored as version {stored}, this code has version {code}: {reason}")
        self.kind = kind
        self.stored = stored
        self.code = code


class DocumentFieldError(PerdureError, ValueError):
    """A value does not fit the document field it was meant for; nothing was changed."""

    def __init__(self, path: str, reason: str) -> None:
        super().__init__(f"{path}: {reason}")
        self.path = path
        """The document's kind, the field, and the place in it, as in ``app.job.notes[2]``."""
        self.reason = reason


class ContextCancelled(PerdureError):
    """The caller's Context was cancelled; the durable work it waited for goes on."""


class ContextDeadline(PerdureError, TimeoutError):
    """The caller's Context passed its deadline; the durable work it waited for goes on."""


class StorageError(PerdureError):
    """Storage could not do what was asked; the message names the first cause."""


class StorageCorrupt(StorageError):
    """The store's bytes contradict themselves; nothing was changed."""


class StorageFormatError(StorageError):
    """The path holds something that is not a store this code can open; it was left untouched."""


class StorageBusy(StorageError):
    """Another process owns the store; the message names the holder."""


class StaleEpochError(StorageError):
    """This writer was superseded: the stored fence is newer; nothing of this commit was stored."""

    def __init__(self, *, mine: int, my_writer: str, stored: int, stored_writer: str) -> None:
        super().__init__(
            f"epoch {mine} of writer {my_writer} was superseded by epoch {stored} of writer {stored_writer}; "
            "stop this writer and reopen the store",
        )
        self.mine = mine
        self.my_writer = my_writer
        self.stored = stored
        self.stored_writer = stored_writer


class InvalidRead(PerdureError, ValueError):
    """A read request that makes no sense (a bad cursor, a limit out of bounds); the session goes on."""
