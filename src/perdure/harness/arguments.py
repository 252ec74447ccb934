"""A tool's arguments: what its function takes, as JSON Schema; repairing and checking what a model wrote.

pydantic does both. It is imported when the first tool is used, not before.
"""

from __future__ import annotations

import inspect
import types
import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from functools import cached_property
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal, TypeAlias, Union, cast, get_args, get_origin
from typing import get_type_hints as resolve_hints

import msgspec

from perdure.harness.environment import ExecutionEnvironment
from perdure.harness.handle import ToolCall
from perdure.harness.repair import Schema, json_in_text, repaired
from perdure.kernel.errors import NotJson, PerdureError
from perdure.kernel.json import JsonValue, check_json, copy_json, decode_json, encode_json

if TYPE_CHECKING:
    from pydantic import BaseModel, ValidationError

Injected: TypeAlias = Literal["call", "environment"]

MAX_PROBLEMS: Final = 20
"""How many problems of one call's arguments are told at once."""


class ToolDefinitionError(PerdureError, TypeError):
    """A function makes no tool, or its types have no JSON Schema."""


class InvalidArguments(PerdureError, ValueError):
    """Arguments do not fit the tool; the text tells every problem, for the model to correct itself."""

    def __init__(self, problems: Sequence[str]) -> None:
        shown = [f"- {problem}" for problem in problems[:MAX_PROBLEMS]]
        if len(problems) > MAX_PROBLEMS:
            shown.append(f"- and {len(problems) - MAX_PROBLEMS} more")
        super().__init__("\n".join(["The arguments do not fit:", *shown]))
        self.problems = tuple(problems)


class Signature:
    """What a tool's function takes: parameters that the model fills, and those that are injected."""

    def __init__(
        self,
        function: Callable[..., object],
        *,
        name: str,
        descriptions: Mapping[str, str],
        local_names: Mapping[str, object] | None = None,
    ) -> None:
        self._function = function
        self._name = name
        self._descriptions = descriptions
        self._parameters = inspect.signature(function).parameters
        for parameter in self._parameters.values():
            if parameter.kind not in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
                raise ToolDefinitionError(
                    f"tool {name!r}: parameter {parameter.name!r} must be one with a name of its own, not "
                    f"{parameter.kind.description}"
                )
            if parameter.annotation is parameter.empty:
                raise ToolDefinitionError(f"tool {name!r}: parameter {parameter.name!r} needs a type annotation")
        self._local_names: Mapping[str, object] | None = None
        try:
            self._resolved = resolve_hints(function, localns=dict(local_names or {}), include_extras=True)
        except NameError:
            # A name that is defined further down: it is looked up at first use, then with these names.
            self._resolved = None
            self._local_names = dict(local_names or {})

    @property
    def _hints(self) -> dict[str, Any]:
        if self._resolved is None:
            try:
                self._resolved = resolve_hints(
                    self._function, localns=dict(self._local_names or {}), include_extras=True
                )
            except NameError as error:
                raise ToolDefinitionError(
                    f"tool {self._name!r}: an annotation names {error.name!r}, which is not defined where the "
                    "tool is; define it in the same module or function"
                ) from None
            self._local_names = None
        return self._resolved

    @cached_property
    def injected(self) -> dict[str, Injected]:
        """Parameters that are filled by their annotation, and with what."""
        found: dict[str, Injected] = {}
        for name in self._parameters:
            for kind in _alternatives(self._hints[name]):
                if kind is ToolCall:
                    found[name] = "call"
                elif kind is ExecutionEnvironment:
                    found[name] = "environment"
        return found

    @cached_property
    def needs_environment(self) -> bool:
        """Whether there is a parameter for the environment that does not take None."""
        return any(
            kind == "environment" and type(None) not in _alternatives(self._hints[name])
            for name, kind in self.injected.items()
        )

    @cached_property
    def names(self) -> tuple[str, ...]:
        """The parameters that the model fills."""
        return tuple(name for name in self._parameters if name not in self.injected)

    @cached_property
    def _fields(self) -> dict[str, str]:
        """Field of the model by parameter. Other names than the parameters': those may clash with pydantic's own."""
        return {name: f"argument_{at}" for at, name in enumerate(self.names)}

    @cached_property
    def _model(self) -> type[BaseModel]:
        from pydantic import ConfigDict, create_model
        from pydantic.errors import PydanticSchemaGenerationError, PydanticUndefinedAnnotation

        # Any: that is how create_model takes its fields.
        fields: dict[str, Any] = {field: self._field(name) for name, field in self._fields.items()}
        try:
            return create_model(self._name, __config__=ConfigDict(extra="forbid", regex_engine="python-re"), **fields)
        except (PydanticSchemaGenerationError, PydanticUndefinedAnnotation) as error:
            raise ToolDefinitionError(f"tool {self._name!r}: a parameter's type has no JSON Schema: {error}") from None

    def _field(self, name: str) -> object:
        from pydantic import Field
        from pydantic.fields import FieldInfo

        hint = self._hints[name]
        metadata = get_args(hint)[1:] if get_origin(hint) is Annotated else ()
        described = any(isinstance(item, FieldInfo) and item.description is not None for item in metadata)
        words = [item for item in metadata if isinstance(item, str)]
        description = None if described else words[0] if words else self._descriptions.get(name)
        field = Field(alias=name) if description is None else Field(alias=name, description=description)
        default = self._parameters[name].default
        annotated = Annotated[hint, field]
        return annotated if default is inspect.Parameter.empty else (annotated, default)

    @cached_property
    def schema(self) -> msgspec.Raw:
        """JSON Schema of the arguments object."""
        from pydantic.errors import PydanticInvalidForJsonSchema
        from pydantic.json_schema import GenerateJsonSchema, PydanticJsonSchemaWarning

        class Untitled(GenerateJsonSchema):
            """Without the titles that only repeat the names."""

            def field_title_should_be_set(self, schema: object) -> bool:
                return False

        try:
            with warnings.catch_warnings():
                # A default that has no JSON is left out; the function fills it in all the same.
                warnings.simplefilter("ignore", PydanticJsonSchemaWarning)
                schema = self._model.model_json_schema(schema_generator=Untitled)
        except PydanticInvalidForJsonSchema as error:
            raise ToolDefinitionError(f"tool {self._name!r}: a parameter's type has no JSON Schema: {error}") from None
        del schema["title"]
        schema.setdefault("properties", {})
        return msgspec.Raw(msgspec.json.encode(schema))

    def read(self, raw: msgspec.Raw) -> dict[str, JsonValue]:
        """The arguments as a model wrote them, repaired where that is plain, and checked.

        Raises InvalidArguments.
        """
        arguments = as_object(raw)
        try:
            self._validate(arguments)
        except _Unfit as unfit:
            wrong = {name: value for name, value in arguments.items() if name in unfit.names}
            right = repaired(wrong, cast("Schema", decode_json(self.schema)))
            if right is wrong or not isinstance(right, dict):
                raise InvalidArguments(unfit.problems) from None
            # Those that fit are left as they are, whatever the schema says of them: it may say less than the types.
            changed = {n: right.get(n, value) for n, value in arguments.items() if n not in wrong or n in right}
            self.values(changed)
            return changed
        return arguments

    def values(self, arguments: JsonValue) -> dict[str, object]:
        """The parameters' values for checked or rewritten arguments. Raises InvalidArguments."""
        if not isinstance(arguments, dict):
            raise InvalidArguments([f"they must be an object, not {_named(arguments)}"])
        try:
            model = self._validate(arguments)
        except _Unfit as unfit:
            raise InvalidArguments(unfit.problems) from None
        given = model.model_fields_set
        return {
            name: getattr(model, field)
            for name, field in self._fields.items()
            # The function fills in its own default: it may be one that pydantic would have copied.
            if field in given or self._parameters[name].default is inspect.Parameter.empty
        }

    def taken(self, arguments: dict[str, JsonValue]) -> dict[str, JsonValue]:
        """Checked arguments as the function gets them, in JSON: converted by its types, with its defaults. What has no
        JSON then is as it was written, or left out. Raises InvalidArguments."""
        try:
            model = self._validate(arguments)
        except _Unfit as unfit:
            raise InvalidArguments(unfit.problems) from None
        found = dict(arguments)
        for name, field in self._fields.items():
            with suppress(Exception):  # of a type of somebody's own
                dumped = model.model_dump(mode="json", include={field}, warnings=False)
                found[name] = copy_json(dumped[field], at=name)
        return found

    def _validate(self, arguments: dict[str, JsonValue]) -> BaseModel:
        from pydantic import ValidationError

        try:
            check_json(arguments, at="arguments")
            return self._model.model_validate_json(encode_json(arguments))
        except NotJson as error:
            raise _Unfit([str(error)]) from None
        except ValidationError as error:
            raise _unfit(error) from None
        except SystemExit:  # of a check that the tool's types bring along; it would end every other conversation too
            raise _Unfit(["a check of them tried to end the process"]) from None


class _Unfit(Exception):
    def __init__(self, problems: list[str], names: Collection[str] = ()) -> None:
        super().__init__()
        self.problems = problems
        self.names = names
        """The arguments that they are about, as a whole."""


def _unfit(error: ValidationError) -> _Unfit:
    problems: list[str] = []
    items = error.errors(include_url=False, include_input=False, include_context=False)
    for item in items:
        where = "".join(f"[{step}]" if isinstance(step, int) else f".{step}" for step in item["loc"]).lstrip(".")
        match item["type"]:
            case "extra_forbidden":
                problems.append(f"{where}: there is no such argument")
            case "missing":
                problems.append(f"{where}: is required and was not given")
            case _:
                message = item["msg"]
                problems.append(f"{where}: {message[:1].lower()}{message[1:]}")
    return _Unfit(problems, {str(item["loc"][0]) for item in items if item["loc"]})


def as_object(raw: msgspec.Raw) -> dict[str, JsonValue]:
    """The arguments that a model wrote; JSON in a text is read. Raises InvalidArguments for what is no object."""
    try:
        value = decode_json(raw)
        # A model's arguments that were no JSON are kept as one text; some models encode them twice.
        for _ in range(2):
            if isinstance(value, str):
                value = json_in_text(value)
    except ValueError as error:
        raise InvalidArguments([f"they are not valid JSON: {error}"]) from None
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise InvalidArguments([f"they must be an object, not {_named(value)}"])
    return value


def _named(value: JsonValue) -> str:
    match value:
        case None:
            return "null"
        case bool():
            return "a boolean"
        case int() | float():
            return "a number"
        case str():
            return "a text"
        case list():
            return "a list"
        case dict():
            return "an object"


def _alternatives(hint: object) -> tuple[object, ...]:
    """The members of a union, or the type itself, without annotations."""
    if get_origin(hint) is Annotated:
        hint = get_args(hint)[0]
    if get_origin(hint) in (Union, types.UnionType):
        return get_args(hint)
    return (hint,)
