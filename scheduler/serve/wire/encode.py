"""Structs to JSON that no client splits in the wrong place."""

import msgspec

_ENCODER = msgspec.json.Encoder()


def encode_json(value: object) -> bytes:
    r"""`value` as JSON in UTF-8, on one line for every reader.

    Raw U+2028, U+2029 and U+0085 are allowed in JSON, but clients that split lines as Unicode does would break an SSE
    event at them: they go out as `\uXXXX`. In UTF-8 their bytes cannot be part of another character.
    """
    return (
        _ENCODER.encode(value)
        .replace(b"\xe2\x80\xa8", b"\\u2028")
        .replace(b"\xe2\x80\xa9", b"\\u2029")
        .replace(b"\xc2\x85", b"\\u0085")
    )
