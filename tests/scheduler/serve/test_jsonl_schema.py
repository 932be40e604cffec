from pathlib import Path

import msgspec
import pytest

from scheduler.serve.jsonl.schema import socket_schema
from scheduler.serve.wire.socket import Generate, Operation, SocketEvent

DOCS = Path(__file__).parents[3] / "docs"


def _examples():
    fence = "```"
    blocks = (DOCS / "socket-protocol.md").read_text().split(f"{fence}json\n")[1:]
    return [line for block in blocks for line in block.partition(fence)[0].splitlines()]


def test_the_committed_schema_is_current():
    committed = (DOCS / "socket-protocol.schema.json").read_text()
    assert committed == socket_schema(), "python -m scheduler.serve.jsonl.schema > docs/socket-protocol.schema.json"


def test_the_schema_names_every_operation_and_event():
    definitions = msgspec.json.decode(socket_schema())["$defs"]
    assert set(definitions["Operation"]["discriminator"]["mapping"]) == {"generate", "cancel", "auth"}
    assert set(definitions["Event"]["discriminator"]["mapping"]) == {"started", "text", "finished", "error"}


@pytest.mark.parametrize("example", _examples())
def test_the_documented_lines_are_lines_of_the_protocol(example):
    kind = Operation if '"op"' in example else SocketEvent
    msgspec.json.decode(example, type=kind)


def test_every_field_of_generate_is_documented():
    text = (DOCS / "socket-protocol.md").read_text()
    assert [name for name in Generate.__struct_fields__ if f"`{name}`" not in text] == []
