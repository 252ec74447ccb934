"""What a server answers, as the result of a call (rules H383 and H384)."""

from __future__ import annotations

import base64
import binascii
from collections.abc import Iterable
from typing import Final

from mcp_types import (
    AudioContent,
    BlobResourceContents,
    CallToolResult,
    ContentBlock,
    EmbeddedResource,
    GetPromptResult,
    ImageContent,
    ReadResourceResult,
    ResourceLink,
    TextContent,
    TextResourceContents,
)

from perdure.harness.handle import MAX_DETAILS
from perdure.harness.messages import Image, Text, UserPart
from perdure.harness.tool import ToolError, ToolResult
from perdure.kernel.errors import NotJson
from perdure.kernel.json import JsonValue, check_json, encode_json
from perdure.tools.contents import media_type
from perdure.tools.mcp.checking import Checker

MAX_IMAGE: Final = 3_750_000
"""Bytes of an image that models look at."""
MAX_IMAGES: Final = 20
"""Of one result; together they stay below what a result may hold."""
MAX_IMAGE_DATA: Final = 20_000_000
"""Characters of base64 that they may take together."""


def call_result(answer: CallToolResult, checker: Checker | None, words: str) -> ToolResult:
    """``words`` for an error: what the server said, without secrets. Raises ToolError for structured content that is
    not what the tool declares."""
    if answer.is_error:
        return ToolResult(words or "The tool failed, and says nothing of it.", is_error=True)
    structured: JsonValue = answer.structured_content
    if checker is not None:
        if structured is None and "structured_content" not in answer.model_fields_set:
            raise ToolError("The tool was run, but gave no structured result, which it declares.")
        _require_json(structured)
        if problems := checker.problems(structured):
            listed = "\n".join(f"- {problem}" for problem in problems)
            raise ToolError(f"The tool was run, but its result is not what it declares:\n{listed}")
    parts = _parts(answer.content)
    if not parts:
        parts = [Text(_json(structured) if structured is not None else "Done; the tool gave no content.")]
    return ToolResult(parts, details=_details(structured))


def words_of(answer: CallToolResult) -> str:
    return "".join(part.text for part in _parts(answer.content) if isinstance(part, Text))


def resource_result(answer: ReadResourceResult) -> ToolResult:
    return ToolResult(_bounded([_resource(each) for each in answer.contents]) or "The resource is empty.")


def prompt_result(answer: GetPromptResult) -> ToolResult:
    parts: list[UserPart] = []
    for message in answer.messages:
        parts += [Text(f"{message.role}:\n"), _part(message.content)]
    return ToolResult(_bounded(parts) or "The prompt is empty.")


def _parts(content: Iterable[ContentBlock]) -> list[UserPart]:
    return _bounded([_part(block) for block in content])


def _part(block: ContentBlock) -> UserPart:
    match block:
        case TextContent():
            return Text(block.text)
        case ImageContent():
            return _image(block.data, block.mime_type)
        case AudioContent():
            return Text(f"[audio, {block.mime_type}, which is not shown]")
        case ResourceLink():
            said = f": {block.description}" if block.description else ""
            return Text(f"[resource {block.name} at {block.uri}{said}]")
        case EmbeddedResource():
            return _resource(block.resource)


def _resource(contents: TextResourceContents | BlobResourceContents) -> UserPart:
    if isinstance(contents, TextResourceContents):
        return Text(contents.text)
    return _image(contents.blob, contents.mime_type or "data of an unknown kind")


def _image(data: str, declared: str) -> UserPart:
    """The image, if its data are one that models can look at: a provider refuses a whole conversation for another."""
    try:
        decoded = base64.b64decode(data, validate=True)
    except (binascii.Error, ValueError):
        return Text(f"[{declared}, whose base64 is damaged]")
    kind = media_type(decoded[:16])
    if kind is None:
        return Text(f"[{declared}, {len(decoded)} bytes, which is not shown]")
    if len(decoded) > MAX_IMAGE:
        return Text(f"[an image of {len(decoded)} bytes; at most {MAX_IMAGE} are shown]")
    return Image(kind, data)


def _bounded(parts: list[UserPart]) -> list[UserPart]:
    """With no more images than a result may hold; texts that follow one another on lines of their own."""
    kept: list[UserPart] = []
    images = size = 0
    for part in parts:
        if isinstance(part, Image):
            images += 1
            size += len(part.data)
            if images > MAX_IMAGES or size > MAX_IMAGE_DATA:
                part = Text("[one more image, which is not shown]")
        if isinstance(part, Text) and kept and isinstance(kept[-1], Text) and not kept[-1].text.endswith("\n"):
            kept[-1] = Text(f"{kept[-1].text}\n")
        kept.append(part)
    return kept


def _require_json(value: JsonValue) -> None:
    try:
        check_json(value, at="structured content")
    except NotJson as error:
        raise ToolError(f"The tool was run, but its result is no JSON: {error}") from None


def _json(value: JsonValue) -> str:
    _require_json(value)
    return encode_json(value).decode()


def _details(value: JsonValue) -> JsonValue:
    """For programs; None if it cannot be stored as such."""
    try:
        check_json(value, at="structured content")
    except NotJson:
        return None
    return value if len(encode_json(value)) <= MAX_DETAILS else None
