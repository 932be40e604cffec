"""The JSON schema of the JSON socket's lines, from the Structs that read and write them.

`python -m scheduler.serve.jsonl.schema > docs/socket-protocol.schema.json` after a change of those Structs.
"""

import json
import sys

import msgspec

from scheduler.serve.wire.socket import Operation, SocketEvent


def socket_schema() -> str:
    """The schema (JSON Schema 2020-12): `$defs/Operation` is a line to the server, `$defs/Event` one from it."""
    (operation, event), definitions = msgspec.json.schema_components(
        [Operation, SocketEvent], ref_template="#/$defs/{name}"
    )
    schema = {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "Lockstep's JSON socket: one of these a line",
        "oneOf": [{"$ref": "#/$defs/Operation"}, {"$ref": "#/$defs/Event"}],
        "$defs": {"Operation": operation, "Event": event, **definitions},
    }
    return json.dumps(schema, indent=2) + "\n"


if __name__ == "__main__":
    sys.stdout.write(socket_schema())
