"""What a task is in code: a kind, a version, types, and phases, which are its public async methods.

    class Ship(Task[Order, Receipt], kind="app.ship", version=2):
        async def start(self, run: Run[Order, Receipt, None]) -> Next[Receipt]:
            label = await printer.print(run.input, key=run.idempotency_key)
            async with run.commit() as tx:
                return tx.go(self.deliver, Parcel(label))

        async def deliver(self, run: Run[Order, Receipt, Parcel]) -> Next[Receipt]: ...

A record names a phase by its method's name; the type of its checkpoint is read from the method's annotation when it
is first needed (rules T1-T3).
"""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Callable, Coroutine, Mapping
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, ClassVar, Final, Generic, TypeVar, cast, get_args, get_origin, get_type_hints

import msgspec

from perdure.kernel.json import JsonValue
from perdure.kernel.records import TaskRecord
from perdure.tasks.codec import Codec
from perdure.tasks.errors import TaskDefinitionError

if TYPE_CHECKING:
    from collections.abc import Awaitable

    from perdure.kernel.transaction import Transaction
    from perdure.tasks.run import Run

I = TypeVar("I")  # noqa: E741  # input, as O is output: the names of a task's types everywhere
O = TypeVar("O")  # noqa: E741
O_co = TypeVar("O_co", covariant=True)

_KIND: Final = re.compile(r"[A-Za-z][A-Za-z0-9_-]{0,60}(\.[A-Za-z0-9_-]{1,60}){0,4}")
_RESERVED: Final = "pi."
"""Kinds that begin so are the package's own."""
_NOT_PHASES: Final = frozenset({"on_abort", "cleanup", "migrate", "encode_input"})

Phase = Callable[[Any], Coroutine[Any, Any, object]]
"""A bound phase as it is called; its exact types are checked where it is named, in ``tx.go`` and the like."""


class Next(Generic[O_co]):
    """That a phase has moved its task on. Made by ``tx.go``, ``tx.complete`` and the like; a phase returns it."""

    __slots__ = ("status",)

    def __init__(self, status: str) -> None:
        self.status = status

    def __repr__(self) -> str:
        return f"Next({self.status})"


class StoredTask(msgspec.Struct, frozen=True, kw_only=True):
    """What a record holds of its code's shapes, as plain JSON: what a migration turns into the next version's."""

    version: int
    """Of the code that wrote it."""
    input: JsonValue
    phase: str
    """The name of the phase that runs next."""
    checkpoint: JsonValue
    """What that phase is given."""


class Task(Generic[I, O]):
    """The base of every task definition. Subclass it with ``kind`` and, from the second on, ``version``.

    Beside ``start`` and further phases a class may define ``on_abort``, ``migrate`` and ``cleanup``. A class without
    ``kind`` is a base for others and cannot be installed.
    """

    kind: ClassVar[str]
    """What records know it by, such as ``shop.ship``."""
    version: ClassVar[int]
    """Of the shapes of its input and checkpoints, from 1."""
    first_phase: ClassVar[str] = "start"
    definition: ClassVar[TaskDefinition]
    """What was read from the class: its phases and types."""

    def __init_subclass__(cls, *, kind: str | None = None, version: int | None = None, builtin: bool = False) -> None:
        super().__init_subclass__()
        above: TaskDefinition | None = getattr(cls, "definition", None)
        if kind is None:
            if above is None:
                if version is not None:
                    raise TaskDefinitionError(f"{cls.__name__}: a version without a kind says nothing")
                return
            kind, builtin = above.kind, True
            version = above.version if version is None else version
        if _KIND.fullmatch(kind) is None:
            raise TaskDefinitionError(f"{cls.__name__}: {kind!r} is no kind; write something like 'app.ship'")
        if kind.startswith(_RESERVED) and not builtin:
            raise TaskDefinitionError(f"{cls.__name__}: kinds beginning with {_RESERVED!r} are reserved: {kind!r}")
        version = 1 if version is None else version
        if version < 1:
            raise TaskDefinitionError(f"{cls.__name__}: versions count from 1, not {version}")
        cls.kind = kind
        cls.version = version
        # Names used in annotations may be local to the function the class is made in.
        frame = inspect.currentframe()
        maker = None if frame is None else frame.f_back
        local = {} if maker is None or maker.f_locals is maker.f_globals else dict(maker.f_locals)
        cls.definition = TaskDefinition(cls, kind, version, local)

    @classmethod
    def encode_input(cls, input: I, /) -> msgspec.Raw:
        """Raises NotJson for what is not of the input type."""
        return cls.definition.input.encode(input)

    async def on_abort(self, run: Run[I, O, object], /) -> Next[O]:
        """Compensate, and decide the outcome of an aborted task: ``return tx.abort(...)`` (rules T72-T74, T83).

        Everything the task owns has ended by then. It may run again after a crash until its outcome has committed.
        Without an override the task ends aborted and no code runs.
        """
        async with run.commit() as tx:
            return tx.abort(run.record.abort_reason or "aborted")

    @classmethod
    def migrate(cls, stored: StoredTask, /) -> StoredTask:
        """What an older version stored, as this version has it: with ``version`` raised to this one's.

        Called in memory, each time such a record is about to run, until the run's next commit stores the result.
        Whatever is raised here leaves the task blocked: migration_failed (rule T31). Without an override no older
        version is understood.
        """
        return stored

    def cleanup(self, tx: Transaction, record: TaskRecord, /) -> Awaitable[None] | None:
        """Called in the commit that ends the task, if its outcome is not its own code's word (rule T60).

        That is: faulted, orphaned, or aborted without ``on_abort``. ``record`` is already terminal. May be async.
        What it raises is reported, and the task ends all the same. Name the conversation of what you append or create:
        the commit may be anybody's. New work needs an owner that may have some, or the whole commit is refused (T52).
        """
        return None


class TaskDefinition:
    """What a task class declares; made with the class, found at ``Ship.definition``. Types resolve when first used."""

    __slots__ = ("_cls", "_input", "_local", "_phases", "_result", "cleans_up", "handles_abort", "kind", "version")

    def __init__(self, cls: type[Task[Any, Any]], kind: str, version: int, local: Mapping[str, object]) -> None:
        self.kind = kind
        self.version = version
        self._cls = cls
        self._local: Mapping[str, object] = local
        self._input: Codec[Any] | None = None
        self._result: Codec[Any] | None = None
        self._phases: dict[str, Codec[Any]] = {}
        self.handles_abort: bool = vars(Task)["on_abort"] is not inspect.getattr_static(cls, "on_abort")
        """Whether the class has an abort handler of its own."""
        self.cleans_up: bool = vars(Task)["cleanup"] is not inspect.getattr_static(cls, "cleanup")
        """Whether it has a clean-up of its own."""
        if not inspect.iscoroutinefunction(getattr(cls, "start", None)):
            raise TaskDefinitionError(f"{cls.__name__} ({kind}): its first phase is an async method named start")
        if not inspect.iscoroutinefunction(cls.on_abort):
            raise TaskDefinitionError(f"{cls.__name__} ({kind}): on_abort is an async method")

    def check(self) -> None:
        """Resolve every type the class declares. Raises TaskDefinitionError."""
        assert self.input is not None
        assert self.result is not None
        for name in dir(self._cls):
            if self._parameter(name) is not None:
                self.phase(name)
        self._local = {}

    @property
    def input(self) -> Codec[Any]:
        if self._input is None:
            self._input = self._codec(_arguments(self._cls)[0], "input")
        return self._input

    @property
    def result(self) -> Codec[Any]:
        if self._result is None:
            self._result = self._codec(_arguments(self._cls)[1], "result")
        return self._result

    def phase(self, name: str) -> Codec[Any]:
        """The codec of a phase's checkpoint. Raises TaskDefinitionError if there is no such phase."""
        known = self._phases.get(name)
        if known is None:
            parameter = self._parameter(name)
            if parameter is None:
                raise TaskDefinitionError(f"{self.kind} version {self.version} has no phase {name!r}")
            known = self._phases[name] = self._codec(self._checkpoint(name, parameter), f"checkpoint of {name}")
        return known

    def name_of(self, phase: Callable[..., object]) -> str:
        """The name of a phase given as a bound method. Raises TaskDefinitionError if it is none of this class."""
        name = getattr(phase, "__name__", "")
        known = name in self._phases or self._parameter(name) is not None
        if not known or getattr(phase, "__func__", None) is not getattr(self._cls, name):
            raise TaskDefinitionError(f"{phase!r} is no phase of {self.kind}; name one of self's async methods")
        return name

    def _parameter(self, name: str) -> inspect.Parameter | None:
        """The one parameter of the phase of that name, its Run; None if there is no such phase."""
        if name.startswith("_") or name in _NOT_PHASES:
            return None
        method = inspect.getattr_static(self._cls, name, None)
        if not inspect.iscoroutinefunction(method):
            return None
        parameters = list(inspect.signature(method).parameters.values())
        if len(parameters) != 2 or any(p.kind is not p.POSITIONAL_OR_KEYWORD for p in parameters):
            return None
        annotation = parameters[1].annotation
        if annotation is inspect.Parameter.empty:
            return parameters[1]
        text = (
            annotation if isinstance(annotation, str) else getattr(get_origin(annotation) or annotation, "__name__", "")
        )
        return parameters[1] if re.match(r"(\w+\.)*Run\b", text) else None

    def _checkpoint(self, name: str, parameter: inspect.Parameter) -> object:
        if parameter.annotation is inspect.Parameter.empty:
            return Any
        owner = inspect.unwrap(getattr(self._cls, name))
        arguments = get_args(self._resolve(parameter.annotation, owner.__globals__, f"{name}'s {parameter.name}"))
        return arguments[2] if len(arguments) == 3 else Any

    def _codec(self, declared: object, what: str) -> Codec[Any]:
        module = sys.modules.get(self._cls.__module__)
        return Codec(self._resolve(declared, vars(module) if module else {}, what), f"{self.kind} {what}")

    def _resolve(self, annotation: object, names: dict[str, Any], what: str) -> object:
        holder = SimpleNamespace(__annotations__={"it": annotation})
        try:
            return get_type_hints(cast("Any", holder), names, dict(self._local))["it"]
        except Exception as error:  # whatever evaluating the user's annotation raises
            raise TaskDefinitionError(
                f"{self._cls.__name__} ({self.kind}): the type of its {what} cannot be resolved: {error}; "
                "what it names must exist at run time"
            ) from error


def _arguments(cls: type[Task[Any, Any]]) -> tuple[object, object]:
    """The input and result types a class gives to Task, through whatever generic bases stand between."""
    for base in cast("tuple[object, ...]", vars(cls).get("__orig_bases__", ())):
        origin = get_origin(base)
        if origin is Task:
            return cast("tuple[object, object]", get_args(base))
        if isinstance(origin, type) and issubclass(origin, Task):
            given = dict(zip(cast("Any", origin).__parameters__, get_args(base), strict=False))
            input, result = _arguments(cast("type[Task[Any, Any]]", origin))
            return _filled(input, given), _filled(result, given)
    for base in cls.__bases__:
        if base is not Task and issubclass(base, Task):
            return _arguments(cast("type[Task[Any, Any]]", base))
    return Any, Any


def _filled(declared: Any, given: dict[Any, Any]) -> object:  # a type as an expression, such as list[X]
    """A type with the arguments a subclass gave in place of its variables."""
    if isinstance(declared, TypeVar):
        return given.get(declared, declared)
    variables = getattr(declared, "__parameters__", ())
    return declared[tuple(given.get(v, v) for v in variables)] if variables and get_args(declared) else declared
