"""The page on security says what the server does."""

import re
from pathlib import Path

import msgspec
import pytest

from engine.params import (
    MAX_BAD_WORD_TOKENS,
    MAX_LOGIT_BIAS,
    MAX_STOP_LENGTH,
    MAX_STOP_STRINGS,
    MAX_STOP_TOKENS,
)
from scheduler.defaults import MAX_CONTEXT
from scheduler.serve import tls
from scheduler.serve.http import protocol
from scheduler.serve.rendering import isolated, worker
from scheduler.serve.service import MAX_CONTEXTS
from scheduler.serve.settings import ServeSettings
from scheduler.serve.wire import decode, prompt
from scheduler.serve.wire.sampling import MAX_BAD_WORD_LENGTH, MAX_BAD_WORDS, MAX_CHOICES, MAX_PROMPT_ENTRIES

PAGE = (Path(__file__).parents[2] / "docs" / "security.md").read_text()
DEFAULTS = {field.name: field.default for field in msgspec.structs.fields(ServeSettings)}
ROWS = re.findall(r"^\| `--([a-z-]+)` \| ([^|]+) \|", PAGE, re.MULTILINE)


def test_it_names_no_option_that_is_not_there():
    named = {name.replace("-", "_") for name in re.findall(r"`?--([a-z][a-z-]+)", PAGE)}
    assert named <= DEFAULTS.keys()


@pytest.mark.parametrize(("option", "told"), ROWS)
def test_its_defaults_are_those_of_the_server(option, told):
    default = DEFAULTS[option.replace("-", "_")]
    unset = {"context": f"the model's, at most {MAX_CONTEXT}"}.get(option, "none")
    assert told == (unset if default is None else str(default))


@pytest.mark.parametrize(
    ("what", "limit"),
    [
        ("a connection without a request", f"{protocol.IDLE_TIMEOUT_S:g} seconds"),
        ("a TLS handshake", f"{tls.HANDSHAKE_S:g} seconds"),
        ("nesting of a JSON body", f"{decode.MAX_DEPTH} levels"),
        ("items in the arrays and objects of a JSON body, together", f"{decode.MAX_ITEMS:,}"),
        ("tokens given to `/detokenize`", f"{MAX_CONTEXTS} contexts"),
        ("`n`", f"{MAX_CHOICES}"),
        ("prompts in one call", f"{prompt.MAX_PROMPTS}"),
        ("`n` times the prompts of one call", f"{prompt.MAX_CALL_CHOICES:,}"),
        (
            "log-probabilities of prompts in one answer, those of `/v1/completions` once for each choice",
            f"{MAX_PROMPT_ENTRIES:,}",
        ),
        ("`stop`", f"{MAX_STOP_STRINGS} strings of {MAX_STOP_LENGTH:,} characters"),
        ("`stop_token_ids`", f"{MAX_STOP_TOKENS:,}"),
        ("`logit_bias`", f"{MAX_LOGIT_BIAS:,} tokens"),
        (
            "`bad_words`",
            f"{MAX_BAD_WORDS} of {MAX_BAD_WORD_LENGTH:,} characters, {MAX_BAD_WORD_TOKENS:,} tokens in all",
        ),
    ],
)
def test_its_numbers_are_those_of_the_code(what, limit):
    assert f"| {what} | {limit} |" in PAGE


def test_what_a_template_may_take_is_what_it_gets():
    assert f"{isolated.CPU_S:g} seconds of a processor and {worker.MEMORY_BYTES >> 20} MiB of address space" in PAGE
    assert f"{isolated.MAX_ANSWER >> 20} MiB" in PAGE
