"""The OpenAPI document as a page to read: plain HTML, whole in one answer, nothing fetched from anywhere."""

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from html import escape
from typing import Any

from scheduler.serve.http.docs.asked import INERT, UNSUPPORTED
from scheduler.serve.http.docs.style import STYLE
from scheduler.serve.http.docs.words import asked_type_words, component_name, default_words, limit_words, type_words

Json = dict[str, Any]

HEADERS = {"Content-Security-Policy": "default-src 'none'; style-src 'unsafe-inline'"}
"""Nothing is fetched, nothing runs."""


def render(document: Json) -> str:
    """`document` as HTML."""
    info = document["info"]
    operations = [
        _Operation(method.upper(), path, operation)
        for path, item in document["paths"].items()
        for method, operation in item.items()
    ]
    schemas = document["components"]["schemas"]
    asked = {name for each in operations for name in each.asks}
    types = [name for name in schemas if name not in asked]
    nav = "".join(f'<a href="#{each.anchor}">{_badge(each.method)} {escape(each.path)}</a>' for each in operations)
    sections = "".join(each.section(schemas) for each in operations)
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{escape(info["title"])} {escape(info["version"])}</title>
<style>{STYLE}</style>
</head>
<body>
<nav>
<h1>{escape(info["title"])} <small>{escape(info["version"])}</small></h1>
{nav}
<a href="#types">Types</a>
</nav>
<main>
<header>
<p class="lead">{escape(info["summary"])}</p>
<p>{_prose(info["description"])}</p>
<p>The same for programs: <a href="/openapi.json">openapi.json</a>.</p>
</header>
{sections}
<h2 id="types">Types</h2>
{"".join(_type(name, schemas[name]) for name in types)}
</main>
</body>
</html>
"""


class _Operation:
    """One path and method."""

    def __init__(self, method: str, path: str, operation: Json) -> None:
        self.method = method
        self.path = path
        self.anchor = operation["operationId"]
        self._operation = operation

    @property
    def asks(self) -> list[str]:
        """The components of the request's body."""
        schema = self._body.get("schema")
        return [component_name(schema)] if schema else []

    @property
    def _body(self) -> Json:
        body: Json = self._operation.get("requestBody", {}).get("content", {}).get("application/json", {})
        return body

    def section(self, schemas: Mapping[str, Json]) -> str:
        """Everything there is to say of it."""
        details = self._operation.get("description", "")
        return f"""<section id="{self.anchor}">
<h2>{_badge(self.method)} <code>{escape(self.path)}</code></h2>
<p>{_prose(self._operation["summary"])}</p>
{f"<p>{_prose(details)}</p>" if details else ""}
{self._example()}
{"".join(_asked(schemas[name]) for name in self.asks)}
{self._answer()}
{self._refusals()}
</section>
"""

    def _example(self) -> str:
        asked = self._body.get("example")
        answered = self._operation["responses"].get("200", {}).get("content", {}).get("application/json", {})
        if "example" not in answered:
            return ""
        places = {each["name"]: each["example"] for each in self._operation.get("parameters", [])}
        call = f"curl http://127.0.0.1:8000{self.path.format_map(places)}"
        if asked is None and self.method != "GET":
            call += f" -X {self.method}"
        if asked is not None:
            call += f" \\\n  -d '{json.dumps(asked, ensure_ascii=False)}'"
        return (
            f"<h3>Example</h3><pre>{escape(call)}</pre>"
            f"<pre>{escape(json.dumps(answered['example'], indent=2, ensure_ascii=False))}</pre>"
        )

    def _answer(self) -> str:
        contents = self._operation["responses"].get("200", {}).get("content", {})
        lines = []
        for media_type, content in contents.items():
            schema = content["schema"]
            if media_type == "text/event-stream":
                payload, _ = schema["properties"]["data"]["anyOf"]
                said = f"events of {_linked(type_words(payload['contentSchema']))}"
            else:
                said = _linked(type_words(schema))
            lines.append(f"<li><code>{escape(media_type)}</code>: {said}</li>")
        return f"<h3>Answer</h3><ul>{''.join(lines)}</ul>" if lines else ""

    def _refusals(self) -> str:
        rows = "".join(
            f"<tr><td><code>{status}</code></td><td>{_prose(response['description'])}</td></tr>"
            for status, response in self._operation["responses"].items()
            if status != "200"
        )
        return f"<details><summary>Errors</summary><table>{rows}</table></details>"


def _asked(schema: Json) -> str:
    """The fields of a request's body, a table to each group."""
    tables = []
    for group, fields in _grouped(schema["properties"]):
        rows = "".join(_asked_row(name, field, required=name in schema["required"]) for name, field in fields)
        table = f'<table class="asked"><tr><th>Field<th>Type<th>May be<th>Default<th>Meaning</tr>{rows}</table>'
        closed = group in (INERT, UNSUPPORTED)
        tables.append(f"<details{'' if closed else ' open'}><summary>{escape(group)}</summary>{table}</details>")
    return f"<h3>Body</h3>{''.join(tables)}"


def _grouped(properties: Mapping[str, Json]) -> Iterator[tuple[str, Iterable[tuple[str, Json]]]]:
    groups: dict[str, list[tuple[str, Json]]] = {}
    for name, schema in properties.items():
        groups.setdefault(schema.get("x-group", ""), []).append((name, schema))
    yield from groups.items()


def _asked_row(name: str, schema: Json, *, required: bool) -> str:
    cells = (
        f"<code>{escape(name)}</code>" + (" <em>required</em>" if required else ""),
        _linked(asked_type_words(schema)),
        _prose(limit_words(schema)),
        _prose(default_words(schema)),
        _prose(schema.get("description", "")),
    )
    return "<tr>" + "".join(f"<td>{cell}</td>" for cell in cells) + "</tr>"


def _type(name: str, schema: Json) -> str:
    rows = "".join(
        f"<tr><td><code>{escape(field)}</code>{'' if field in schema['required'] else ' <em>if there</em>'}</td>"
        f"<td>{_linked(type_words(kind))}</td><td>{_prose(kind.get('description', ''))}</td></tr>"
        for field, kind in schema["properties"].items()
    )
    return f"""<section id="type-{escape(name)}">
<h3>{escape(name)}</h3>
<p>{_prose(schema.get("description", ""))}</p>
<table class="answered"><tr><th>Field<th>Type<th>Meaning</tr>{rows}</table>
</section>
"""


def _badge(method: str) -> str:
    return f'<b class="{method.lower()}">{method}</b>'


def _prose(text: str) -> str:
    """`text` with what stands between backticks as code."""
    return re.sub(r"`([^`]*)`", r"<code>\1</code>", escape(text, quote=False))


def _linked(words: str) -> str:
    """A type in words, each component in it a link."""
    return re.sub(r"\b([A-Z]\w+)", r'<a href="#type-\1">\1</a>', escape(words))
