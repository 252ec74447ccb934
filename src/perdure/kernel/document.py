"""Document definitions: typed JSON state as a class (rules K94-K98, K108-K110).

    class Job(Document, kind="app.job", scope="conversation", history="rewindable", fork="as_of"):
        state: Literal["new", "shipped"] = "new"
        notes: list[str] = field(default_factory=list)

An instance is either a draft, whose fields are written through a Recorder, or a read-only snapshot.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from typing import (
    TYPE_CHECKING,
    ClassVar,
    Final,
    Self,
    TypeAlias,
    TypeVar,
    cast,
    get_origin,
    overload,
)

import msgspec
from typing_extensions import dataclass_transform, override

from perdure.kernel.draft import DraftList, DraftObject, Recorder
from perdure.kernel.errors import DocumentFieldError, DocumentVersionError
from perdure.kernel.fields import Schema
from perdure.kernel.json import JsonValue, copy_json, same_json
from perdure.kernel.records import ForkPolicy, History, Scope

CheckpointPolicy: TypeAlias = Callable[[int, int, int], bool]
"""From the bytes of the last base, the deltas after it, and their bytes: whether a new base is due."""

T = TypeVar("T")

_KIND: Final = re.compile(r"[A-Za-z][A-Za-z0-9_-]{0,60}(\.[A-Za-z0-9_-]{1,60}){0,4}")
_RESERVED: Final = "pi."
"""Kinds that begin so are the package's own."""

_MISSING: Final = object()


@overload
def field(*, default: T) -> T: ...
@overload
def field(*, default_factory: Callable[[], T]) -> T: ...
def field(*, default: object = _MISSING, default_factory: Callable[[], object] | None = None) -> object:
    """A document field's initial value, or what makes it. Exactly one is given."""
    if (default is _MISSING) == (default_factory is None):
        raise TypeError("field() takes either default or default_factory")
    return _Field(default, default_factory)


class _Field:
    """The descriptor behind a field, which reads it; Document.__setattr__ writes."""

    __slots__ = ("default", "factory", "name")

    def __init__(self, default: object, factory: Callable[[], object] | None) -> None:
        self.default: object = default
        self.factory: Callable[[], object] | None = factory
        self.name: str = ""

    def make(self) -> object:
        return self.default if self.factory is None else self.factory()

    def __get__(self, document: Document | None, owner: type[Document]) -> object:
        if document is None:
            return self
        draft = document._draft  # pyright: ignore[reportPrivateUsage]
        if draft is None:
            return document._read(self.name)  # pyright: ignore[reportPrivateUsage]
        value = draft[self.name]
        if type(value) is DraftObject or type(value) is DraftList:
            schema = document.definition.schema
            schema.types()
            return schema.rich(self.name, value.to_json()) if self.name in schema.structs else value
        return value


class DocumentDefinition(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """What a document class declares; made with the class, found at ``Job.definition``."""

    kind: str
    version: int
    scope: Scope
    history: History
    fork: ForkPolicy
    family: bool
    """One document a key, instead of one document."""
    cls: type[Document]
    schema: Schema
    checkpoint_when: CheckpointPolicy | None
    """None: the default policy."""

    def initial(self) -> JsonValue:
        """A fresh initial value. Raises DocumentFieldError for a default that does not fit its field."""
        return self.schema.filled({})

    def migrate(self, value: JsonValue, from_version: int) -> JsonValue:
        """``value`` of an older version as one of this version, checked; itself it is not changed.

        Raises DocumentVersionError without a migration, and DocumentFieldError if it made what does not fit.
        """
        migrated = copy_json(self.cls.migrate(copy_json(value), from_version), at=self.kind)
        self.schema.check_value(migrated)
        return self.schema.filled(migrated)


def resolve_version(definition: DocumentDefinition, stored_version: int, value: JsonValue) -> tuple[JsonValue, bool]:
    """A stored value as this code's version has it, and whether it was migrated (rules K108-K110).

    Raises DocumentVersionError for a value that is newer, or older without a migration.
    """
    if stored_version == definition.version:
        return value, False
    if stored_version > definition.version:
        reason = "newer code wrote it; run that code, or a later one"
        raise DocumentVersionError(definition.kind, stored_version, definition.version, reason)
    return definition.migrate(value, stored_version), True


@dataclass_transform(kw_only_default=True, field_specifiers=(field,))
class Document:
    """The base of every document class.

    Class keywords: ``kind`` names it in the store, ``version`` (1) counts its shapes, ``scope`` says what it
    stands beside. Of conversation scope only: ``history`` ("latest", or "rewindable") and ``fork``, what a
    fork of the conversation gets ("initial", "current", or, if rewindable, "as_of"). ``family=True``: one
    document a key.

    Fields are annotated and have an initial value, given directly or by ``field()``. A class may define
    ``checkpoint_when(base_bytes, deltas, delta_bytes) -> bool``, a class method, to say when a base is due.
    A declaration that makes no sense raises TypeError when the class is created.

    ``Job(state="shipped")`` is a snapshot on its own, its other fields initial. Two instances of a class are
    equal if their JSON is (1, 1.0 and True are not).
    """

    __slots__ = ("_copies", "_draft", "_value")

    definition: ClassVar[DocumentDefinition]
    _fields: ClassVar[dict[str, _Field]] = {}

    def __init_subclass__(
        cls,
        *,
        kind: str,
        version: int = 1,
        scope: Scope,
        history: History | None = None,
        fork: ForkPolicy | None = None,
        family: bool = False,
        builtin: bool = False,
    ) -> None:
        super().__init_subclass__()
        _check_declaration(kind, version, scope, history, fork, builtin)
        fields = dict(cls._fields)
        for name in _own_fields(cls, kind):
            default = cast("object", cls.__dict__.get(name, _MISSING))
            if default is _MISSING:
                raise TypeError(f"{kind}.{name} needs an initial value: a default, or field(default_factory=...)")
            made = default if isinstance(default, _Field) else _Field(default, None)
            made.name = name
            fields[name] = made
            setattr(cls, name, made)
        for name, value in cls.__dict__.items():
            if isinstance(value, _Field) and name not in fields:
                raise TypeError(f"{kind}.{name} needs a type annotation to be a field")
        cls._fields = fields
        cls.definition = DocumentDefinition(
            kind=kind,
            version=version,
            scope=scope,
            history=history or "latest",
            fork=fork or "initial",
            family=family,
            cls=cls,
            schema=Schema(cls, kind, {name: made.make for name, made in fields.items()}),
            checkpoint_when=cast("CheckpointPolicy | None", getattr(cls, "checkpoint_when", None)),
        )

    if TYPE_CHECKING:
        _draft: DraftObject | None
        _value: dict[str, JsonValue]
        _copies: dict[str, object]
    else:
        # Hidden from the checker, which would otherwise take any name for an attribute.

        def __init__(self, **values: object) -> None:
            recorder = Recorder(self.definition.initial(), at=self.definition.kind)
            draft = type(self).over(recorder)
            for name, value in values.items():
                setattr(draft, name, value)
            _bind(self, recorder.value, None)

        def __setattr__(self, name: str, value: object) -> None:
            self._write(name, value)

        def __delattr__(self, name: str) -> None:
            kind = self.definition.kind
            raise AttributeError(f"{kind}.{name} cannot be deleted; assign another value")

    @classmethod
    def from_json(cls, value: JsonValue) -> Self:
        """A snapshot of ``value``, which is not copied and must not change. Absent fields read as initial."""
        document = cls.__new__(cls)
        _bind(document, cls.definition.schema.filled(value), None)
        return document

    @classmethod
    def over(cls, recorder: Recorder) -> Self:
        """A draft: reads and writes go through ``recorder``, which checks them against the fields."""
        definition = cls.definition
        value, root = recorder.current, recorder.root
        if not isinstance(value, dict) or not isinstance(root, DraftObject):
            raise DocumentFieldError(definition.kind, "a document is an object")
        document = cls.__new__(cls)
        _bind(document, {}, root)
        if not cls._fields.keys() <= value.keys():
            for name, value in definition.schema.filled(root.copy()).items():
                root.setdefault(name, value)
        recorder.at = definition.kind
        recorder.guard = definition.schema
        return document

    @classmethod
    def migrate(cls, value: JsonValue, version: int) -> JsonValue:
        """Define it to bring ``value`` from an older ``version`` to this one; changing ``value`` is allowed.

        Without a definition, what an older version stored is refused with DocumentVersionError.
        """
        definition = cls.definition
        reason = f"{cls.__name__} defines no migrate()"
        raise DocumentVersionError(definition.kind, version, definition.version, reason)

    def shared_json(self) -> JsonValue:
        """What a snapshot holds, uncopied, so not to be changed: ``from_json`` of it is another snapshot."""
        assert self._draft is None, "a draft's value changes"
        return self._value

    def to_json(self) -> JsonValue:
        """A plain copy that nothing shares."""
        return copy_json(self._value) if self._draft is None else self._draft.to_json()

    @override
    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Document) or type(other) is not type(self):
            return NotImplemented
        return same_json(self._plain(), other._plain())

    __hash__ = None  # pyright: ignore[reportAssignmentType] # as of every value that may change

    @override
    def __repr__(self) -> str:
        # Contents may be secret, so none are shown.
        state = "snapshot" if self._draft is None else "draft"
        return f"<{type(self).__name__} {state} of {self.definition.kind}: {', '.join(self._fields)}>"

    @override
    def __reduce__(self) -> tuple[Callable[[JsonValue], Self], tuple[JsonValue]]:
        return type(self).from_json, (self.to_json(),)

    def _plain(self) -> JsonValue:
        return self._value if self._draft is None else self._draft.to_json()

    def _read(self, name: str) -> object:
        """A snapshot's field."""
        stored = self._value[name]
        if not isinstance(stored, (list, dict)):
            return stored
        if not stored and name not in self.definition.schema.structs:
            return type(stored)()
        if name not in self._copies:
            schema = self.definition.schema
            schema.types()
            self._copies[name] = schema.rich(name, stored) if name in schema.structs else copy_json(stored)
        return self._copies[name]

    def _write(self, name: str, value: object) -> None:
        kind = self.definition.kind
        if name not in self._fields:
            raise AttributeError(f"{kind} has no field {name!r}; its fields are {', '.join(self._fields)}")
        if self._draft is None:
            raise AttributeError(f"{kind}.{name}: a snapshot is read-only; open a draft in a transaction to change it")
        self._draft[name] = self.definition.schema.plain(name, value)


def _bind(document: Document, value: JsonValue, draft: DraftObject | None) -> None:
    """Past Document.__setattr__, which knows fields only."""
    object.__setattr__(document, "_value", value)
    object.__setattr__(document, "_draft", draft)
    object.__setattr__(document, "_copies", {})


def _check_declaration(
    kind: str,
    version: int,
    scope: Scope,
    history: History | None,
    fork: ForkPolicy | None,
    builtin: bool,
) -> None:
    if _KIND.fullmatch(kind) is None:
        raise TypeError(f"document kind {kind!r} must be short names of letters, digits, - and _, joined by dots")
    if kind.startswith(_RESERVED) and not builtin:
        raise TypeError(f"document kind {kind!r}: kinds that begin with {_RESERVED!r} are perdure's own")
    if type(version) is not int or version < 1:
        raise TypeError(f"{kind}: version counts from 1, not {version!r}")
    _check_choice(kind, "scope", scope, ("session", "conversation", "task"))
    if scope != "conversation" and (history is not None or fork is not None):
        raise TypeError(f"{kind}: history and fork are of documents with conversation scope, not {scope}")
    if history is not None:
        _check_choice(kind, "history", history, ("latest", "rewindable"))
    if fork is not None:
        _check_choice(kind, "fork", fork, ("as_of", "current", "initial"))
    if fork == "as_of" and history != "rewindable":
        raise TypeError(f'{kind}: fork="as_of" reads the past, so it needs history="rewindable"')


def _check_choice(kind: str, name: str, value: str, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise TypeError(f"{kind}: {name} is one of {', '.join(choices)}, not {value!r}")


def _own_fields(cls: type[Document], kind: str) -> list[str]:
    """The names that the class itself annotates, class variables aside."""
    names: list[str] = []
    for name, hint in inspect.get_annotations(cls).items():
        spelled = hint if isinstance(hint, str) else ""
        if hint is ClassVar or get_origin(hint) is ClassVar or re.match(r"(\w+\.)*ClassVar\b", spelled):
            continue
        if name.startswith("_") or name in _TAKEN:
            raise TypeError(f"{kind}.{name}: a field cannot have this name")
        names.append(name)
    return names


_TAKEN = frozenset({*dir(Document), "definition", "checkpoint_when"})
"""What a field would hide."""
