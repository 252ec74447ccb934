"""``@tool``: a typed function becomes a tool that a model can call (rules H78 to H85).

    @tool(replay="safe")
    async def population(city: str) -> int:
        '''How many people live in a city.'''

Called as it is, a tool is its function. What the pipeline does with it is in ``calls``.
"""

from __future__ import annotations

import asyncio
import contextvars
import inspect
import re
import sys
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from functools import cached_property, partial
from typing import Any, Final, Generic, Literal, ParamSpec, TypeAlias, TypeVar, cast, get_args, overload

import msgspec

from perdure.harness.approval import RequiresApproval
from perdure.harness.arguments import InvalidArguments, Signature, ToolDefinitionError
from perdure.harness.control import MOST_ADDED, Control, Handoff
from perdure.harness.docstring import split_docstring
from perdure.harness.documents import ToolErrorCode
from perdure.harness.environment import Effects, ExecutionEnvironment
from perdure.harness.handle import CallEnded, CallStream, ToolCall
from perdure.harness.messages import Image, Text, UserPart
from perdure.harness.model import ToolSpec
from perdure.harness.output import DEFAULT_LIMITS, OutputLimits
from perdure.harness.reconcile import Reconciled
from perdure.kernel.errors import PerdureError
from perdure.kernel.json import JsonValue, check_json, copy_json

__all__ = [
    "AnyTool",
    "CallEnded",
    "CallStream",
    "InvalidArguments",
    "OutputLimits",
    "ReplayPolicy",
    "ToolCall",
    "ToolDefinition",
    "ToolDefinitionError",
    "ToolError",
    "ToolResult",
    "tool",
]

P = ParamSpec("P")
R = TypeVar("R")
R_co = TypeVar("R_co", covariant=True)

ReplayPolicy: TypeAlias = Literal["safe", "unsafe"]
"""Whether a call that was interrupted may simply be run again."""

EffectsOf: TypeAlias = Effects | Callable[[Mapping[str, JsonValue]], Effects]
"""The same for every call, or a plain function that says it of a call's arguments, those that were given."""

Caller: TypeAlias = Literal["model", "tool"]
"""Who calls a tool: the model, or another tool."""

_NAME: Final = re.compile(r"[A-Za-z0-9_-]{1,64}")
MOST_USED: Final = 1e18
"""Of one kind, by one call: no total of such comes to infinity, which no JSON holds."""


class ToolError(PerdureError):
    """Raised by a tool: its message is the call's result, an error with the code tool_error."""


@dataclass(frozen=True, slots=True)
class ToolResult:
    """What a tool may return in place of a plain value."""

    content: str | Sequence[UserPart] | None = None
    """What the model reads. None: what the call streamed with ``call.output()``."""
    _: KW_ONLY
    details: JsonValue = None
    """For programs and people, beside the content. None: the last details that the call showed."""
    is_error: bool = False
    """The model is told that the call failed."""
    code: ToolErrorCode | None = None
    """Of an error that the harness wrote; a tool leaves it alone."""
    usage: Mapping[str, float] = field(default_factory=dict[str, float])
    """What the call used, by a name of the tool's choice; summed up in ``pi.usage``."""
    diagnostics: Sequence[str] = ()
    """For people, after those that the call showed."""
    control: Control | None = None
    """What becomes of the run once the round is complete (rules H104 to H106)."""
    add_tools: Sequence[str] = ()
    """Names of tools that the conversation has from the next request on (rule H107)."""

    def __post_init__(self) -> None:
        """Raises TypeError, ValueError or NotJson for what could not be stored, or not be read back."""
        for at, part in enumerate(self.parts):
            match part:
                case Text(str()):
                    pass  # what is no text in it is replaced when it is bounded
                case Image(str() as media_type, str() as data):
                    check_json([media_type, data], at=f"ToolResult.content[{at}]")
                case _:  # pyright: ignore[reportUnnecessaryComparison]  # of untyped callers
                    raise TypeError(f"ToolResult.content[{at}] must be a Text or an Image of texts")
        check_json(self.details, at="ToolResult.details")
        _require(type(self.is_error) is bool, "is_error must be a bool")
        _require(self.code is None or self.code in get_args(ToolErrorCode), "code must be one of ToolErrorCode")
        noted = not isinstance(self.diagnostics, str) and all(type(text) is str for text in self.diagnostics)
        _require(noted, "diagnostics must be texts")
        _require(
            self.control in (None, "terminate") or type(self.control) is Handoff,
            "control must be 'terminate', a Handoff or None",
        )
        named = not isinstance(self.add_tools, str) and all(type(name) is str for name in self.add_tools)
        _require(named and all(map(_NAME.fullmatch, self.add_tools)), "add_tools must be names of tools")
        _require(len(self.add_tools) <= MOST_ADDED, f"add_tools may name {MOST_ADDED} tools")
        for name, amount in self.usage.items():
            check_json({name: 0}, at="ToolResult.usage")
            fits = type(amount) in (int, float) and abs(amount) <= MOST_USED
            _require(fits, f"usage[{name!r}] must be a number of at most {MOST_USED:g}")

    @property
    def parts(self) -> tuple[UserPart, ...]:
        """The content as parts."""
        if self.content is None:
            return ()
        return (Text(self.content),) if isinstance(self.content, str) else tuple(self.content)

    @property
    def text(self) -> str:
        """Its texts, one behind the other."""
        return "".join(part.text for part in self.parts if isinstance(part, Text))


def _require(condition: bool, what: str) -> None:
    if not condition:
        raise ValueError(f"ToolResult.{what}")


IntentFunction = TypeVar("IntentFunction", bound=Callable[..., Awaitable[JsonValue]])
ReconcileFunction = TypeVar("ReconcileFunction", bound=Callable[..., Awaitable[Reconciled]])


@dataclass(frozen=True, kw_only=True, eq=False)
class ToolDefinition(Generic[P, R_co]):
    """A tool. Make one with ``@tool``."""

    function: Callable[P, R_co]
    name: str
    description: str
    replay: ReplayPolicy = "unsafe"
    sequential: bool = False
    """The calls of a round that has one of these run one after the other."""
    output: OutputLimits = DEFAULT_LIMITS
    effects: EffectsOf = "world"
    adoptable: bool = False
    timeout_ms: int | None = None
    requires_approval: RequiresApproval = False
    callers: Collection[Caller] = ("model", "tool")
    deferred: bool = False
    result: object = None
    """The type that results are checked against; None: any."""
    signature: Signature = field(repr=False)

    def __post_init__(self) -> None:
        if _NAME.fullmatch(self.name) is None:
            raise ValueError(f"a tool's name is 1 to 64 letters, digits, '_' and '-', not {self.name!r}")
        if self.replay not in get_args(ReplayPolicy):
            raise ValueError(f"tool {self.name!r}: replay is one of {get_args(ReplayPolicy)}, not {self.replay!r}")
        changes = self.effects
        if changes not in get_args(Effects) and (not callable(changes) or inspect.iscoroutinefunction(changes)):
            raise ValueError(
                f"tool {self.name!r}: effects is one of {get_args(Effects)} or a plain function, not {changes!r}"
            )
        if self.timeout_ms is not None and self.timeout_ms <= 0:
            raise ValueError(f"tool {self.name!r}: timeout_ms must be positive, not {self.timeout_ms}")
        asks = self.requires_approval
        if not isinstance(asks, bool) and (not callable(asks) or inspect.iscoroutinefunction(asks)):
            raise ValueError(f"tool {self.name!r}: requires_approval is a bool or a plain function, not {asks!r}")
        if isinstance(self.callers, str) or not self.callers or not set(self.callers) <= set(get_args(Caller)):
            raise ValueError(f"tool {self.name!r}: callers are some of {get_args(Caller)}, not {self.callers!r}")
        if self.deferred and "model" not in self.callers:
            raise ValueError(f"tool {self.name!r}: only what a model may call can be deferred")
        if self.adoptable and self.effects == "world":
            raise ValueError(f"tool {self.name!r}: only what stays in its environment is adoptable")
        # A dataclass's own docstring would hide the function's.
        object.__setattr__(self, "__doc__", self.function.__doc__)
        object.__setattr__(self, "__wrapped__", self.function)

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R_co:
        return self.function(*args, **kwargs)

    @cached_property
    def spec(self) -> ToolSpec:
        """The tool as it is offered to a model."""
        return ToolSpec(name=self.name, description=self.description, parameters=self.signature.schema)

    def effects_of(self, arguments: JsonValue, report: Callable[[BaseException], None] | None = None) -> Effects:
        """What a call with these arguments changes: anything, where a function of the tool's fails to say (rule S159).

        ``report`` is told why it does.
        """
        if not callable(self.effects):
            return self.effects
        try:
            # Of its own: what it does to them is not what the environment hears of the call.
            said = self.effects(cast("Mapping[str, JsonValue]", copy_json(arguments, at="arguments")))
            if said not in get_args(Effects):
                raise TypeError(f"effects is one of {get_args(Effects)}, not {said!r}")
        except (Exception, SystemExit) as error:  # the tool's own code
            if report is not None:
                report(error)
            return "world"
        return said

    @property
    def uses_environment(self) -> bool:
        """Whether the function, or one beside it, takes the environment."""
        return any("environment" in signature.injected.values() for signature in self._signatures())

    @property
    def needs_environment(self) -> bool:
        """Whether one of them takes no None for it."""
        return any(signature.needs_environment for signature in self._signatures())

    def _signatures(self) -> list[Signature]:
        return [self.signature, *(signature for _, signature in self._beside.values())]

    @property
    def prepares_intent(self) -> bool:
        """Whether it has an intent function."""
        return "intent" in self._beside

    @property
    def reconciles(self) -> bool:
        """Whether it has a reconcile function."""
        return "reconcile" in self._beside

    @cached_property
    def _beside(self) -> dict[str, tuple[Callable[..., Awaitable[object]], Signature]]:
        """The functions beside the tool's own, by what they are for."""
        return {}

    def intent(self, function: IntentFunction) -> IntentFunction:
        """Decorate the async function that prepares the intent, once a tool.

        It takes some of the tool's parameters by name (and the environment, if it wants), runs before the intent
        is committed and must change nothing; what it returns is stored with the intent and is ``call.intent``
        from then on, in reruns too. What it raises is the call's result, and the tool is not run.
        """
        self._put_beside("intent", function, _local_names())
        return function

    def reconcile(self, function: ReconcileFunction) -> ReconcileFunction:
        """Decorate the async function that says what became of a call that was cut off, once a tool (rule H93).

        It takes some of the tool's parameters by name (and the call and the environment, if it wants), and looks
        outside, by ``call.idempotency_key`` at best: ``Done(result)``, ``NeverHappened()`` or ``Unknown(reason)``. It
        must change nothing: it is asked again if its process ends. One that raises, or takes longer than a minute,
        does not know.
        """
        self._put_beside("reconcile", function, _local_names())
        return function

    def _put_beside(
        self, what: str, function: Callable[..., Awaitable[object]], local_names: Mapping[str, object] | None
    ) -> None:
        named = f"{self.name}.{what}"
        if what in self._beside:
            raise ValueError(f"tool {self.name!r} has its {what} function already")
        if not inspect.iscoroutinefunction(function):
            raise ToolDefinitionError(f"{named} must be an async function")
        signature = Signature(function, name=named, descriptions={}, local_names=local_names)
        unknown = set(inspect.signature(function).parameters) - set(inspect.signature(self.function).parameters)
        unknown -= set(signature.injected) if unknown else set()
        if unknown:
            raise ToolDefinitionError(f"{named} takes {', '.join(sorted(unknown))}, which the tool does not take")
        self._beside[what] = (function, signature)

    async def prepare_intent(
        self, values: Mapping[str, object], call: ToolCall, environment: ExecutionEnvironment | None
    ) -> JsonValue:
        """What the intent function gives for these values; None without one."""
        return cast("JsonValue", await self._ask_beside("intent", values, call, environment))

    async def ask_outside(
        self, values: Mapping[str, object], call: ToolCall, environment: ExecutionEnvironment | None
    ) -> object:
        """What the reconcile function says of a call with these values; None without one."""
        return await self._ask_beside("reconcile", values, call, environment)

    async def _ask_beside(
        self, what: str, values: Mapping[str, object], call: ToolCall, environment: ExecutionEnvironment | None
    ) -> object:
        known = self._beside.get(what)
        if known is None:
            return None
        function, signature = known
        parameters, defaults = inspect.signature(function).parameters, inspect.signature(self.function).parameters
        chosen = {
            name: values[name] if name in values else defaults[name].default
            for name in signature.names
            if name in values or parameters[name].default is inspect.Parameter.empty
        }
        try:
            return await function(**chosen, **_injected(signature, call, environment))
        except SystemExit:
            raise ToolError("the tool tried to end the process") from None  # and every other conversation with it

    async def run(
        self, values: Mapping[str, object], call: ToolCall, environment: ExecutionEnvironment | None
    ) -> object:
        """Run the function; a synchronous one in a thread. Cancelled, it returns once the function has."""
        arguments = {**values, **_injected(self.signature, call, environment)}
        function: Callable[..., Any] = self.function  # its parameters are known to the signature only
        try:
            if inspect.iscoroutinefunction(function):
                return await function(**arguments)
            return await _in_thread(partial(function, **arguments))
        except SystemExit:
            # It would end the event loop, and every other conversation with it.
            raise ToolError("the tool tried to end the process") from None

    def to_result(self, value: object) -> ToolResult:
        """A returned value as a result. Raises NotJson, or ToolError for what has no JSON."""
        if value is None:
            return ToolResult()
        if isinstance(value, ToolResult):
            return value
        return ToolResult(value if isinstance(value, str) else _json_text(value))

    def check_result(self, result: ToolResult) -> None:
        """Raise ToolError unless the text fits the declared result type."""
        if self.result is None or result.is_error:
            return
        from pydantic import ValidationError

        text = result.text
        try:
            if self.result is str:
                return
            self._result_adapter.validate_json(text)
        except ValidationError as error:
            first = error.errors(include_url=False, include_input=False, include_context=False)[0]
            where = "".join(f"[{step!r}]" for step in first["loc"])
            raise ToolError(f"the result is not what {self.name} declares: result{where}: {first['msg']}") from None

    @cached_property
    def _result_adapter(self) -> Any:  # pydantic's TypeAdapter, which is not imported here
        from pydantic import TypeAdapter

        declared: Any = self.result
        return TypeAdapter(declared)


AnyTool: TypeAlias = ToolDefinition[..., object]


@overload
def tool(function: Callable[P, R], /) -> ToolDefinition[P, R]: ...
@overload
def tool(
    *,
    name: str | None = None,
    description: str | None = None,
    replay: ReplayPolicy = "unsafe",
    sequential: bool = False,
    output: OutputLimits = DEFAULT_LIMITS,
    result: object = None,
    effects: EffectsOf = "world",
    adoptable: bool = False,
    timeout_ms: int | None = None,
    requires_approval: RequiresApproval = False,
    callers: Collection[Caller] = ("model", "tool"),
    deferred: bool = False,
) -> Callable[[Callable[P, R]], ToolDefinition[P, R]]: ...
def tool(
    function: Callable[P, R] | None = None,
    /,
    *,
    name: str | None = None,
    description: str | None = None,
    replay: ReplayPolicy = "unsafe",
    sequential: bool = False,
    output: OutputLimits = DEFAULT_LIMITS,
    result: object = None,
    effects: EffectsOf = "world",
    adoptable: bool = False,
    timeout_ms: int | None = None,
    requires_approval: RequiresApproval = False,
    callers: Collection[Caller] = ("model", "tool"),
    deferred: bool = False,
) -> ToolDefinition[P, R] | Callable[[Callable[P, R]], ToolDefinition[P, R]]:
    """Make a tool of a function whose parameters are annotated, async or not.

    The model gets the function's name, its docstring and a JSON Schema of its parameters. Those annotated
    ``ToolCall`` or ``ExecutionEnvironment`` are filled by the harness. A parameter is described by the
    docstring's ``Args:`` section, by ``Annotated[str, "..."]`` or by pydantic's ``Field``.

    The function returns a text, JSON, a dataclass, a msgspec or pydantic value, or a ToolResult; an exception
    is an error result. A synchronous function runs in a thread.

    - ``replay``: "safe" if a call may be run again after it was interrupted; else such a call ends
      ``interrupted``.
    - ``sequential``: the calls of a round with this tool run one after the other.
    - ``output``: how much of a result is kept, in whole lines, and which end of it.
    - ``result``: a type that the result's JSON must fit.
    - ``effects``: what the tool changes: nothing ("read"), only its environment ("space"), or anything ("world"); or a
      plain function that says so of a call's arguments. One that raises means "world", and is reported
      (``effects_check_failed``).
    - ``adoptable``: the result is a pure function of the exit and output of the one command it runs.
    - ``callers``: who may call it: "model", "tool" (another tool, by ``call.call``) or both; a tool that is not for the
      model is never offered to it.
    - ``deferred``: it is not offered until the model has found it, with ``find_tools``.
    - ``timeout_ms``: after this the function is cancelled and the call ends ``timeout``.
    - ``requires_approval``: whether a person, or a rule, has to allow each call; or a function that says so of one, as
      an ApprovalQuestion. See ``Harness.approvals()``.

    Raises ToolDefinitionError or ValueError for a function or an option that makes no tool.
    """

    def define(function: Callable[P, R], local_names: Mapping[str, object] | None) -> ToolDefinition[P, R]:
        named: str = name if name is not None else function.__name__
        text, parameters = split_docstring(function.__doc__)
        return ToolDefinition(
            function=function,
            name=named,
            description=description if description is not None else text,
            replay=replay,
            sequential=sequential,
            output=output,
            result=result,
            effects=effects,
            adoptable=adoptable,
            timeout_ms=timeout_ms,
            requires_approval=requires_approval,
            callers=callers,
            deferred=deferred,
            signature=Signature(function, name=named, descriptions=parameters, local_names=local_names),
        )

    if function is not None:
        return define(function, _local_names())

    def decorate(function: Callable[P, R]) -> ToolDefinition[P, R]:
        return define(function, _local_names())

    return decorate


def _local_names() -> Mapping[str, object] | None:
    """The local names where the caller was called: a tool's annotations may use them."""
    here = inspect.currentframe()
    frame = here.f_back.f_back if here is not None and here.f_back is not None else None
    return None if frame is None or frame.f_locals is frame.f_globals else frame.f_locals


def _injected(signature: Signature, call: ToolCall, environment: ExecutionEnvironment | None) -> dict[str, object]:
    return {name: call if kind == "call" else environment for name, kind in signature.injected.items()}


async def _in_thread(function: Callable[[], object]) -> object:
    def run() -> object:
        try:
            return function()
        except StopIteration as error:
            # No future takes this one: whoever waits for the thread would wait for ever.
            raise RuntimeError("StopIteration was raised") from error

    context = contextvars.copy_context()
    future = asyncio.get_running_loop().run_in_executor(None, context.run, run)
    cancelled: asyncio.CancelledError | None = None
    while not future.done():
        try:
            await asyncio.wait([future])
        except asyncio.CancelledError as error:
            # A thread cannot be stopped. Whoever waits for the end of this call waits for the thread.
            cancelled = error
    if cancelled is not None:
        future.exception()
        raise cancelled
    return future.result()


def _json_text(value: object) -> str:
    plain = msgspec.to_builtins(value, enc_hook=_plain)
    check_json(plain, at="result")
    return msgspec.json.encode(plain).decode()


def _plain(value: object) -> object:
    if "pydantic" in sys.modules:
        from pydantic import BaseModel

        if isinstance(value, BaseModel):
            return value.model_dump(mode="json")
    raise ToolError(f"the tool returned a {type(value).__name__}, which has no JSON")
