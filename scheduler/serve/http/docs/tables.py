"""The tables of `docs/api.md`, made of the OpenAPI document.

`python -m scheduler.serve.http.docs.tables docs/api.md` renews them after a change of a Struct, of what is written of
its fields or of the routing table.
"""

import re
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import get_args

import msgspec

from scheduler.serve.http.docs.openapi import Json, openapi_document
from scheduler.serve.http.docs.words import asked_type_words, default_words, limit_words, type_words
from scheduler.serve.http.routes import routing_table
from scheduler.serve.settings import ServeSettings
from scheduler.serve.wire.chat import ChatRequest
from scheduler.serve.wire.completions import CompletionRequest
from scheduler.serve.wire.generation import CallFields

_LIMITS = (
    "max_queue",
    "max_queue_tokens",
    "max_body",
    "body_timeout",
    "write_timeout",
    "request_timeout",
    "max_connections",
    "sse_ping",
    "grace",
)


class Tables:
    """What there is to fill in between the marks of a text, `<!-- paths -->` to `<!-- end -->` for one."""

    def __init__(self) -> None:
        routes = routing_table()
        self._document = openapi_document(routes)
        self._schemas: dict[str, Json] = self._document["components"]["schemas"]
        asked = [route.takes for route in routes if route.takes is not None]
        self._calls = {struct.__name__ for struct in asked if issubclass(struct, CallFields)}

    def renewed(self, text: str) -> str:
        """`text` with every table as it should be. Raises `KeyError` for a mark that means nothing."""

        def block(match: re.Match[str]) -> str:
            return self._block(match, text)

        return re.sub(r"(<!-- ([\w ]+) -->\n).*?(<!-- end -->)", block, text, flags=re.DOTALL)

    def _block(self, match: re.Match[str], text: str) -> str:
        what, _, name = match[2].partition(" ")
        blocks: dict[str, Callable[[str], str]] = {
            "contents": lambda _: _contents(text),
            "paths": lambda _: self._paths(),
            "common": lambda _: self._common(),
            "asked": self._own,
            "answered": lambda _: self._answered(),
            "limits": lambda _: _limits(),
        }
        return f"{match[1]}\n{blocks[what](name)}\n{match[3]}"

    def _paths(self) -> str:
        rows = [
            (f"`{method.upper()} {path}`", operation["summary"])
            for path, item in self._document["paths"].items()
            for method, operation in item.items()
        ]
        return _table(("path", "answers with"), rows)

    def _shared(self) -> dict[str, Json]:
        """The fields every call for text has."""
        chat, completion = (self._schemas[kind.__name__]["properties"] for kind in (ChatRequest, CompletionRequest))
        return {name: schema for name, schema in chat.items() if completion.get(name) == schema}

    def _common(self) -> str:
        return _grouped(self._shared(), required=())

    def _own(self, name: str) -> str:
        schema = self._schemas[name]
        shared = self._shared() if name in self._calls else {}
        own = {field: about for field, about in schema["properties"].items() if shared.get(field) != about}
        return _grouped(own, schema["required"])

    def _answered(self) -> str:
        return "\n".join(
            _answer(name, schema)
            for name, schema in self._schemas.items()
            if not any("x-group" in about for about in schema["properties"].values())
        )


def _contents(text: str) -> str:
    """A list of the headings, each a link to it under the name GitHub gives it."""
    headings = re.findall(r"^(##+) (.+)$", text, re.MULTILINE)
    return "".join(f"{'  ' * (len(level) - 2)}- [{title}](#{anchor(title)})\n" for level, title in headings)


def anchor(title: str) -> str:
    """What a link to the heading `title` names."""
    return re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-")


def _limits() -> str:
    settings = {setting.name: setting for setting in msgspec.structs.fields(ServeSettings)}
    rows = []
    for name in _LIMITS:
        _, about = get_args(settings[name].type)
        default = settings[name].default
        said = "none" if default is None else f"{default:,}"
        rows.append((f"`--{name.replace('_', '-')}`", said, about.description))
    return _table(("option of `lockstep serve`", "default", "meaning"), rows)


def _grouped(fields: dict[str, Json], required: Iterable[str]) -> str:
    groups: dict[str, list[tuple[str, ...]]] = {}
    for name, schema in fields.items():
        marked = f"`{name}`, required" if name in required else f"`{name}`"
        row = (marked, asked_type_words(schema), limit_words(schema), default_words(schema), schema["description"])
        groups.setdefault(schema["x-group"], []).append(row)
    head = ("field", "type", "may be", "default", "meaning")
    return "\n".join(f"**{group}**\n\n{_table(head, rows)}" for group, rows in groups.items())


def _answer(name: str, schema: Json) -> str:
    rows = [
        (
            f"`{field}`" + ("" if field in schema["required"] else ", if there"),
            type_words(about),
            about.get("description", ""),
        )
        for field, about in schema["properties"].items()
    ]
    return f"**{name}**: {schema['description']}\n\n{_table(('field', 'type', 'meaning'), rows)}"


def _table(head: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    lines = [head, ("---",) * len(head), *rows]
    return "".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |\n" for line in lines)


if __name__ == "__main__":
    file = Path(sys.argv[1])
    file.write_text(Tables().renewed(file.read_text()))
