"""The reference pages, written from the sources: ``python docs/api/build.py``; with ``--check`` only compared.

Everything is read from the syntax of the modules, so that the pages are the same whatever Python writes them: the
signature as it is written, the docstring, and the text below each field. Rules that are cited become links.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

HERE = Path(__file__).parent
ROOT = HERE.parent.parent
SOURCE = ROOT / "src"
RULES = ROOT / "docs" / "rules"

FACES = ("perdure", "perdure.events", "perdure.models", "perdure.spaces", "perdure.testing")

INTERFACES = (
    ("perdure.harness.environment", "ExecutionEnvironment"),
    ("perdure.harness.model", "Models"),
    ("perdure.kernel.storage", "Storage"),
)
"""What they say of an operation is not said again where a class has all of theirs."""

AREAS = {
    "agents": ("Harness, conversations, submissions", ("perdure.harness",)),
    "tools": (
        "Tools",
        (
            "perdure.tools",
            "perdure.harness.tool",
            "perdure.harness.handle",
            "perdure.harness.reconcile",
            "perdure.harness.control",
            "perdure.harness.output",
            "perdure.harness.environment",
        ),
    ),
    "approvals": ("Approvals, questions", ("perdure.harness.approv", "perdure.harness.person")),
    "hooks": ("Hooks", ("perdure.harness.hooks",)),
    "models": (
        "Models and messages",
        ("perdure.harness.model", "perdure.harness.messages", "perdure.harness.settings"),
    ),
    "kernel": ("Session, documents, entries", ("perdure.kernel",)),
    "tasks": ("Tasks", ("perdure.tasks", "perdure.kernel.records")),
    "storage": ("Storage", ("perdure.storage",)),
    "telemetry": ("Telemetry", ("perdure.telemetry",)),
    "errors": ("Errors", ("perdure.kernel.errors",)),
    "events": ("perdure.events", ()),
    "spaces": ("perdure.spaces", ()),
    "testing": ("perdure.testing", ()),
}
"""Page -> its title, and where its names live: the longest beginning decides. A face but the first has its own page."""

_MADE = re.compile(r"\b(?:Open|Make) one with\b|^A handle\b|^Made by\b", re.MULTILINE)
_CITED = re.compile(r"\b[KTHPS]\d+\b")
_DEFINED = re.compile(r"^(?:- |\| )\*\*([KTHPS]\d+)\*\*", re.MULTILINE)
_HEADING = re.compile(r"^## (.+)$", re.MULTILINE)
_FUNCTION = (ast.FunctionDef, ast.AsyncFunctionDef)


@dataclass(frozen=True)
class Found:
    """Where a name is defined."""

    module: str
    nodes: tuple[ast.stmt, ...]
    """Several, of a function with overloads."""
    text: str
    """What stands below an assignment."""


@cache
def syntax(module: str) -> ast.Module:
    path = SOURCE / Path(*module.split("."))
    file = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    return ast.parse(file.read_text(encoding="utf-8"))


@cache
def rules() -> dict[str, str]:
    """Rule -> the link to its part of the rules."""
    found: dict[str, str] = {}
    for path in sorted(RULES.glob("*.md")):
        text = path.read_text(encoding="utf-8")
        headings = [(match.start(), match[1]) for match in _HEADING.finditer(text)]
        for match in _DEFINED.finditer(text):
            above = [title for at, title in headings if at < match.start()]
            anchor = re.sub(r"[^\w\- ]", "", above[-1].lower()).replace(" ", "-") if above else ""
            found[match[1]] = f"../rules/{path.name}" + (f"#{anchor}" if anchor else "")
    return found


def find(module: str, name: str) -> Found:
    """Follow imports to the definition of a name. Raises LookupError."""
    body = [
        node
        for outer in syntax(module).body
        for node in (outer.body if isinstance(outer, ast.If) else [outer])  # also what is imported for types alone
    ]
    same = tuple(node for node in body if isinstance(node, (*_FUNCTION, ast.ClassDef)) and node.name == name)
    if same:
        return Found(module, same, "")
    for at, node in enumerate(body):
        if isinstance(node, ast.ImportFrom) and node.module is not None:
            for alias in node.names:
                if (alias.asname or alias.name) == name:
                    return find(node.module, alias.name)
        targets = (
            node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
        )
        if any(isinstance(target, ast.Name) and target.id == name for target in targets):
            return Found(module, (node,), text_at(body, at + 1))
    raise LookupError(f"{module} has no {name}")


def text_at(body: list[ast.stmt], at: int) -> str:
    """The text that stands there as a statement, which is how fields are documented."""
    if at < len(body) and isinstance(node := body[at], ast.Expr) and isinstance(node.value, ast.Constant):
        value = node.value.value
        return inspect.cleandoc(value) if isinstance(value, str) else ""
    return ""


# --- writing -----------------------------------------------------------------------------------------------------


def described(face: str, name: str) -> str:
    found = find(face, name)
    node = found.nodes[0]
    parts = [f"## {name}", f"`from {face} import {name}`"]
    if isinstance(node, ast.ClassDef):
        bases = ", ".join(ast.unparse(each) for each in [*node.bases, *(kw.value for kw in node.keywords if False)])
        made = constructor(node)
        parts.append(fenced([f"class {name}({bases})" if bases else f"class {name}", *signatures(made, name)]))
        parts += [prose(text) for text in (ast.get_docstring(node) or "", documented(made))]
        parts += members(found.module, node)
    elif isinstance(node, _FUNCTION):
        parts.append(fenced(signatures(found.nodes)))
        parts.append(prose(documented(found.nodes)))
    else:
        parts.append(fenced([assigned(node)]))
        value: object = getattr(importlib.import_module(face), name)
        ours = type(value).__module__.startswith("perdure.")  # such as a decorator that is an object
        own = vars(value).get("__doc__") if ours and hasattr(value, "__dict__") else None
        parts.append(prose(found.text or (inspect.cleandoc(own) if isinstance(own, str) else "")))
    parts += [terms(found)]
    return "\n\n".join(part for part in parts if part)


def terms(found: Found) -> str:
    """What the short names in its signatures stand for: choices, unions and numbers that are no names of a face."""
    said: dict[str, str] = {}
    for node in found.nodes:
        above = list(bases(found.module, node)) if isinstance(node, ast.ClassDef) else []
        for module, each in [(found.module, node), *above]:
            for part in signed(each):
                for name in (inner.id for inner in ast.walk(part) if isinstance(inner, ast.Name)):
                    if name not in said and name not in public() and (text := term(module, name)):
                        said[name] = text
    return "\n".join(said.values())


def signed(node: ast.AST) -> Iterator[ast.AST]:
    """The annotations and defaults that a reader of the reference is shown."""
    if isinstance(node, ast.ClassDef):
        for each in node.body:
            hidden = isinstance(each, _FUNCTION) and each.name.startswith("_") and each not in constructor(node)
            if not hidden:
                yield from signed(each)
    elif isinstance(node, _FUNCTION):
        given = node.args
        every = [*given.posonlyargs, *given.args, *given.kwonlyargs, *filter(None, (given.vararg, given.kwarg))]
        yield from (each.annotation for each in every if each.annotation is not None)
        yield from (each for each in [*given.defaults, *given.kw_defaults, node.returns] if each is not None)
    elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and not node.target.id.startswith("_"):
        yield node.annotation
        if node.value is not None and not isinstance(node.value, ast.Call):
            yield node.value


def term(module: str, name: str) -> str:
    """One line, or nothing for what is neither."""
    try:
        found = find(module, name)
    except (LookupError, OSError):
        return ""
    match found.nodes[0]:
        case ast.AnnAssign(value=ast.Subscript(value=ast.Name(id="Literal")) | ast.BinOp(op=ast.BitOr()) as value):
            told = ast.unparse(value)
        case ast.Assign() | ast.AnnAssign():
            number: object = getattr(importlib.import_module(found.module), name)
            if type(number) not in (int, float):
                return ""
            told = f"{number:,}"
        case _:
            return ""
    return f"- `{name}` is `{told}`" + (f": {linked(' '.join(found.text.split()))}" if found.text else "")


@cache
def public() -> frozenset[str]:
    return frozenset(name for face in FACES for name in importlib.import_module(face).__all__)


def members(module: str, node: ast.ClassDef) -> Iterator[str]:
    """Fields and public methods, its own first, then those of bases of this package that are no names of the face."""
    seen: set[str] = set()
    elsewhere = {name for _, _, names in said_elsewhere(module, node) for name in names}
    fields: list[str] = []
    methods: list[str] = []
    above = [each for _, each in bases(module, node)]
    for each in [node, *above]:
        for at, member in enumerate(each.body):
            name = member.target.id if isinstance(member, ast.AnnAssign) and isinstance(member.target, ast.Name) else ""
            if name and not name.startswith("_") and name not in seen:
                seen.add(name)
                text = text_at(each.body, at + 1)
                line = f"- `{assigned(member)}`"
                fields.append(f"{line}: {linked(' '.join(text.split()))}" if text else line)
        functions: dict[str, list[ast.stmt]] = {}
        for member in each.body:
            if isinstance(member, _FUNCTION) and member.name not in seen and not member.name.startswith("_"):
                functions.setdefault(member.name, []).append(member)
        seen |= functions.keys()
        for name in elsewhere & functions.keys():
            del functions[name]
        for name, nodes in functions.items():
            text = documented(tuple(nodes)) or next(
                (said for each in above if (said := operations(each).get(name))), ""
            )
            methods += [f"### {node.name}.{name}", fenced(signatures(tuple(nodes)))]
            methods += [prose(text)] if text else []
    if fields:
        yield "\n".join(fields)
    yield from methods
    for home, interface, names in said_elsewhere(module, node):
        yield f"As `{interface}` of `{home}` says: {', '.join(f'`{name}`' for name in names)}."


def operations(node: ast.ClassDef) -> dict[str, str]:
    """The public methods that stand in a class, and what is said of each."""
    found = {each.name: ast.get_docstring(each) or "" for each in node.body if isinstance(each, _FUNCTION)}
    return {name: text for name, text in found.items() if not name.startswith("_")}


def said_elsewhere(module: str, node: ast.ClassDef) -> Iterator[tuple[str, str, list[str]]]:
    """The interfaces that a class keeps, and what of it is explained there alone."""
    own: dict[str, str] = {}
    for each in (node, *(above for _, above in bases(module, node))):
        own = operations(each) | own
    for home, name in INTERFACES:
        found = find(home, name)
        interface = found.nodes[0]
        assert isinstance(interface, ast.ClassDef), f"{name} is a class"
        wanted = [interface, *(above for _, above in bases(found.module, interface))]
        asked = {method for each in wanted for method in operations(each)}
        if own.keys() >= asked and (module, node.name) != (home, name):
            yield home, name, [method for method, text in own.items() if method in asked and not text]


def assigned(node: ast.stmt) -> str:
    """A field or a value. What is made by a call is told by its type alone."""
    match node:
        case ast.AnnAssign(value=ast.Call()):
            return f"{ast.unparse(node.target)}: {ast.unparse(node.annotation)} = ..."
        case ast.Assign(value=ast.Call() as call):
            return f"{ast.unparse(node.targets[0])}: {ast.unparse(call.func)}"
        case _:
            return ast.unparse(node)


def constructor(node: ast.ClassDef) -> tuple[ast.stmt, ...]:
    """None of what is made by something else, as its docstring says."""
    if _MADE.search(ast.get_docstring(node) or ""):
        return ()
    return tuple(each for each in node.body if isinstance(each, _FUNCTION) and each.name == "__init__")


def bases(module: str, node: ast.ClassDef) -> Iterator[tuple[str, ast.ClassDef]]:
    """The classes of this package that it inherits from."""
    for base in node.bases:
        name = base.value if isinstance(base, ast.Subscript) else base
        if not isinstance(name, ast.Name):
            continue
        try:
            found = find(module, name.id)
        except (LookupError, OSError):
            continue  # of another package
        if isinstance(above := found.nodes[0], ast.ClassDef):
            yield found.module, above
            yield from bases(found.module, above)


def signatures(nodes: tuple[ast.stmt, ...], made: str = "") -> list[str]:
    """As written, without bodies; of a function with overloads, those. ``made``: whose constructor it is."""
    functions = [node for node in nodes if isinstance(node, _FUNCTION)]
    overloads = [node for node in functions if "overload" in decorators(node)]
    lines: list[str] = []
    for node in overloads or functions[-1:]:
        kind = "async def" if isinstance(node, ast.AsyncFunctionDef) else "def"
        returns = "" if node.returns is None or made else f" -> {ast.unparse(node.returns)}"
        lines += [f"@{each}" for each in decorators(node) if each in ("property", "classmethod", "staticmethod")]
        lines += wrapped(made or f"{kind} {node.name}", arguments(node.args), returns)
    return lines


def arguments(given: ast.arguments) -> list[str]:
    """One text a parameter, without self and cls."""
    positional = [*given.posonlyargs, *given.args]
    defaults = [None] * (len(positional) - len(given.defaults)) + list(given.defaults)
    said: list[str] = []
    for at, (each, default) in enumerate(zip(positional, defaults, strict=True)):
        if not (at == 0 and each.arg in ("self", "cls")):
            said.append(parameter(each, default))
        if given.posonlyargs and at == len(given.posonlyargs) - 1 and said:
            said.append("/")
    if given.vararg:
        said.append(f"*{parameter(given.vararg, None)}")
    elif given.kwonlyargs:
        said.append("*")
    said += [parameter(each, default) for each, default in zip(given.kwonlyargs, given.kw_defaults, strict=True)]
    return [*said, f"**{parameter(given.kwarg, None)}"] if given.kwarg else said


def parameter(each: ast.arg, default: ast.expr | None) -> str:
    typed = each.arg if each.annotation is None else f"{each.arg}: {ast.unparse(each.annotation)}"
    if default is None:
        return typed
    return f"{typed} = {ast.unparse(default)}" if each.annotation is not None else f"{typed}={ast.unparse(default)}"


def wrapped(begin: str, said: list[str], end: str) -> list[str]:
    line = f"{begin}({', '.join(said)}){end}"
    return [line] if len(line) <= 100 else [f"{begin}(", *(f"    {each}," for each in said), f"){end}"]


def decorators(node: ast.FunctionDef | ast.AsyncFunctionDef) -> list[str]:
    return [ast.unparse(each) for each in node.decorator_list]


def documented(nodes: tuple[ast.stmt, ...]) -> str:
    texts = [ast.get_docstring(node) for node in nodes if isinstance(node, _FUNCTION)]
    return next((text for text in texts if text), "")


def fenced(lines: list[str]) -> str:
    return "\n".join(["```text", *lines, "```"])


def prose(text: str) -> str:
    """A docstring as Markdown: what is indented stands as it is, but for texts of parameters, which become a list."""
    parts: list[str] = []
    for block in re.split(r"\n\s*\n", text):
        lines = block.splitlines()
        if lines and all(line.startswith("    ") for line in lines):
            parts.append(fenced([line[4:] for line in lines]))
        elif lines and all(re.match(r"[a-z_]\w*(, [a-z_]\w*)*: |    |Args:", line) for line in lines):
            parts.append(listed(lines))
        elif lines:
            parts.append(linked("\n".join(lines)))
    return "\n\n".join(parts)


def listed(lines: list[str]) -> str:
    items: list[str] = []
    deeper = "        " if lines[0] == "Args:" else "    "
    for line in lines:
        if line.startswith(deeper) and items:
            items[-1] += f" {line.strip()}"
        elif line != "Args:":
            names, _, text = line.strip().partition(": ")
            items.append(f"- **{names}**: {text}")
    return linked("\n".join(items))


def linked(text: str) -> str:
    """Rules become links, and what is code in a docstring is code in Markdown."""
    text = text.replace("``", "`")
    pieces = re.split(r"(`[^`]*`)", text)
    known = rules()

    def link(match: re.Match[str]) -> str:
        return f"[{match[0]}]({known[match[0]]})" if match[0] in known else match[0]

    return "".join(piece if piece.startswith("`") else _CITED.sub(link, piece) for piece in pieces)


# --- pages -------------------------------------------------------------------------------------------------------


def area_of(face: str, name: str) -> str:
    if face != FACES[0]:
        return face.rpartition(".")[2]
    module = find(face, name).module
    fits = [(len(begin), area) for area, (_, begins) in AREAS.items() for begin in begins if module.startswith(begin)]
    if not fits:
        raise LookupError(f"{name} is in {module}, which has no page: say in AREAS where it belongs")
    return max(fits)[1]


def summary(face: str, name: str) -> str:
    """The first sentence of what is said of it."""
    text = described(face, name)
    body = re.sub(r"```text\n.*?\n```", "", text, flags=re.DOTALL).split("\n\n")[2:]
    words = " ".join(next((part for part in body if part.strip() and part.lstrip()[0] not in "-#"), "").split())
    return re.split(r"(?<=[.:;])\s", words, maxsplit=1)[0].rstrip(":;")


def pages() -> dict[str, str]:
    """Every page by its file name."""
    names: dict[str, list[tuple[str, str]]] = {area: [] for area in AREAS}
    for face in FACES:
        for name in importlib.import_module(face).__all__:
            if not name.startswith("__"):
                names[area_of(face, name)].append((face, name))
    made: dict[str, str] = {}
    index = [
        "# API reference",
        "",
        "Written from the docstrings by `python docs/api/build.py`. The guide: "
        "[docs/guide](../guide/README.md); the promises: [docs/rules](../rules/README.md).",
        "",
    ]
    for area, (title, _) in AREAS.items():
        known = sorted(names[area], key=lambda each: each[1].lower())
        if not known:
            raise LookupError(f"the page {area} is empty")
        body = [f"# {title}", "", "Written from the docstrings; [all pages](README.md).", ""]
        for face, name in known:
            body += [described(face, name), ""]
        made[f"{area}.md"] = "\n".join(body)
        index += [f"## [{title}]({area}.md)", ""]
        anchors: set[str] = set()
        for face, name in known:
            said = summary(face, name)
            anchor = name.lower() if name.lower() not in anchors else f"{name.lower()}-1"
            anchors.add(anchor)
            index.append(f"- [`{name}`]({area}.md#{anchor})" + (f": {said}" if said else ""))
        index.append("")
    made["README.md"] = "\n".join(index)
    return made


def outdated() -> list[str]:
    """Pages that are not as the sources say, or are too many."""
    now = pages()
    there = {path.name: path.read_text(encoding="utf-8") for path in HERE.glob("*.md")}
    return sorted(name for name in now.keys() | there.keys() if now.get(name) != there.get(name))


def write() -> None:
    now = pages()
    for path in HERE.glob("*.md"):
        if path.name not in now:
            path.unlink()
    for name, text in now.items():
        (HERE / name).write_text(text, encoding="utf-8")


if __name__ == "__main__":
    if sys.argv[1:] == ["--check"]:
        wrong = outdated()
        sys.exit(f"not as the sources say: {', '.join(wrong)}; run: python docs/api/build.py" if wrong else 0)
    write()
