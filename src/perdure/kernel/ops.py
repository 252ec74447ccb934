"""Operations: what a commit did to a document, small and replayable (rules K104-K107).

Each names a place by its path from the root and needs nothing else to be understood. Applying is persistent:
the value applied to is never changed, and what no operation touched is shared between before and after.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias, cast

import msgspec

from perdure.kernel.errors import NotJson, OperationError
from perdure.kernel.json import JsonPath, JsonValue, copy_json, path_text


class Set(msgspec.Struct, frozen=True, array_like=True, tag="s"):
    """Put ``value`` at an object's key (new or not), in place of a list's item, or (empty path) of all."""

    path: JsonPath
    value: JsonValue


class Delete(msgspec.Struct, frozen=True, array_like=True, tag="d"):
    """Remove an existing key of an object."""

    path: JsonPath


class Splice(msgspec.Struct, frozen=True, array_like=True, tag="l"):
    """In the list at ``path``: take ``remove`` items away at ``index`` and put those of ``insert`` there."""

    path: JsonPath
    index: int
    remove: int
    insert: list[JsonValue]


class Append(msgspec.Struct, frozen=True, array_like=True, tag="a"):
    """Add ``text`` at the end of the string at ``path``."""

    path: JsonPath
    text: str


class Trim(msgspec.Struct, frozen=True, array_like=True, tag="t"):
    """Take ``count`` code points away from the end of the string at ``path``."""

    path: JsonPath
    count: int


Op: TypeAlias = Set | Delete | Splice | Append | Trim

_encoder = msgspec.json.Encoder()
_decoder = msgspec.json.Decoder(tuple[Op, ...])


def encode_ops(ops: Sequence[Op]) -> bytes:
    """The stored form: a JSON list of small arrays, each led by the letter of its operation."""
    return _encoder.encode(ops)


def decode_ops(data: bytes | msgspec.Raw) -> tuple[Op, ...]:
    """Raises NotJson for bytes that are no list of operations."""
    try:
        return _decoder.decode(data)
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
        raise NotJson("$", f"not a list of operations: {error}") from None


def copy_ops(ops: Sequence[Op]) -> tuple[Op, ...]:
    """The same operations, with values of their own: those of a commit are part of the document itself."""
    return tuple(_copy(op) for op in ops)


def _copy(op: Op) -> Op:
    match op:
        case Set(path, value) if isinstance(value, (list, dict)):
            return Set(path, copy_json(value))
        case Splice(path, index, remove, insert) if insert:
            return Splice(path, index, remove, cast("list[JsonValue]", copy_json(insert)))
        case _:
            return op


def apply(value: JsonValue, ops: Sequence[Op]) -> JsonValue:
    """A new value: ``value`` after ``ops``, in order. Raises OperationError for one that does not fit."""
    target = _Target(value)
    for op in ops:
        target.apply(op)
    return target.value


def to_json_patch(before: JsonValue, ops: Sequence[Op]) -> list[dict[str, JsonValue]]:
    """``ops`` as an RFC 6902 JSON Patch that leads from ``before`` to the same value.

    The standard knows no operation on strings: an append or a trim becomes a replace by the whole string.
    """
    target = _Target(before)
    patch: list[dict[str, JsonValue]] = []
    for op in ops:
        known = target.holds(op.path)
        target.apply(op)
        match op:
            case Set(path, value):
                verb = "replace" if known else "add"
                patch.append({"op": verb, "path": _pointer(path), "value": copy_json(value)})
            case Delete(path):
                patch.append({"op": "remove", "path": _pointer(path)})
            case Splice(path, index, remove, insert):
                common = min(remove, len(insert))
                for at in range(index, index + common):
                    replaced = copy_json(insert[at - index])
                    patch.append({"op": "replace", "path": _pointer((*path, at)), "value": replaced})
                for _ in range(remove - common):
                    patch.append({"op": "remove", "path": _pointer((*path, index + common))})
                for at in range(index + common, index + len(insert)):
                    added = copy_json(insert[at - index])
                    patch.append({"op": "add", "path": _pointer((*path, at)), "value": added})
            case Append(path) | Trim(path):
                patch.append({"op": "replace", "path": _pointer(path), "value": target.at(path)})
    return patch


def _pointer(path: JsonPath) -> str:
    """A path as an RFC 6901 JSON Pointer."""
    return "".join("/" + str(step).replace("~", "~0").replace("/", "~1") for step in path)


class _Target:
    """A value under application: a container is copied when first written, and only then."""

    def __init__(self, value: JsonValue) -> None:
        self.value = value
        # Kept by identity, and kept alive: the id of a freed container may come back as another's.
        self._owned: dict[int, list[JsonValue] | dict[str, JsonValue]] = {}

    def apply(self, op: Op) -> None:
        path = op.path
        match op:
            case Set(value=value):
                self._put(path, value)
            case Delete():
                parent = self._own(path[:-1])
                if not path or type(parent) is not dict or path[-1] not in parent:
                    raise OperationError(path_text(path), "only an object's existing key can be deleted")
                del parent[path[-1]]
            case Splice(index=index, remove=remove, insert=insert):
                items = self._own(path)
                if type(items) is not list:
                    raise OperationError(path_text(path), f"{_name(items)} cannot be spliced, only a list")
                end = index + remove
                if not 0 <= index <= end <= len(items):
                    raise OperationError(path_text(path), f"no items {index} to {end} in {_name(items)}")
                items[index:end] = insert
            case Append(text=text):
                self._put(path, self._text(path) + text)
            case Trim(count=count):
                old = self._text(path)
                if not 0 <= count <= len(old):
                    raise OperationError(path_text(path), f"no {count} code points to trim from {len(old)}")
                self._put(path, old[: len(old) - count])

    def at(self, path: JsonPath) -> JsonValue:
        node = self.value
        for length, step in enumerate(path):
            node = _child(node, step, path[: length + 1])
        return node

    def holds(self, path: JsonPath) -> bool:
        try:
            self.at(path)
        except OperationError:
            return False
        return True

    def _text(self, path: JsonPath) -> str:
        text = self.at(path)
        if type(text) is not str:
            raise OperationError(path_text(path), f"{_name(text)} has no text to append or trim")
        return text

    def _put(self, path: JsonPath, value: JsonValue) -> None:
        if not path:
            self.value = value
            return
        parent = self._own(path[:-1])
        key = path[-1]
        if type(parent) is dict and type(key) is str:
            parent[key] = value
            return
        if type(parent) is not list or type(key) is not int or not 0 <= key < len(parent):
            raise OperationError(path_text(path), f"no such place in {_name(parent)}")
        parent[key] = value

    def _own(self, path: JsonPath) -> JsonValue:
        """What stands at ``path``, copied, with all containers above it, unless they were copied before."""
        node = self.value = self._copied(self.value)
        for length, step in enumerate(path):
            child = _child(node, step, path[: length + 1])
            copied = self._copied(child)
            if copied is not child:
                cast("dict[str | int, JsonValue]", node)[step] = copied
            node = copied
        return node

    def _copied(self, node: JsonValue) -> JsonValue:
        if not isinstance(node, (list, dict)) or id(node) in self._owned:
            return node
        copy = node.copy()
        self._owned[id(copy)] = copy
        return copy


def _child(node: JsonValue, step: str | int, path: JsonPath) -> JsonValue:
    if type(node) is dict and type(step) is str and step in node:
        return node[step]
    if type(node) is list and type(step) is int and 0 <= step < len(node):
        return node[step]
    raise OperationError(path_text(path), f"no such place in {_name(node)}")


def _name(node: JsonValue) -> str:
    match node:
        case dict():
            return "an object"
        case list():
            return f"a list of {len(node)}"
        case _:
            return f"a {type(node).__name__}"
