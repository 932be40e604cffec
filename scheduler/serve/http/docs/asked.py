"""What the fields of requests mean and what they may be, in the words and numbers users read.

The Structs in `scheduler.serve.wire` say a field's type, and the code that checks it says no to the rest; here both are
written down once, for the OpenAPI document, the page made of it and the tables of `docs/api.md`. Tests hold every limit
here to what the server does.
"""

from dataclasses import dataclass, field
from typing import Any

import msgspec

from engine.params import (
    MAX_BAD_WORD_TOKENS,
    MAX_LOGIT_BIAS,
    MAX_LOGPROBS,
    MAX_STOP_LENGTH,
    MAX_STOP_STRINGS,
    MAX_STOP_TOKENS,
    SamplingParams,
)
from scheduler.serve.http.docs.unsupported import WHAT_IS_NOT_SUPPORTED
from scheduler.serve.wire import chat, inert, llama
from scheduler.serve.wire.chat import ROLES
from scheduler.serve.wire.prompt import MAX_PROMPTS
from scheduler.serve.wire.sampling import MAX_BAD_WORD_LENGTH, MAX_BAD_WORDS, MAX_CHOICES

Schema = dict[str, Any]

INERT = "Of no effect"
UNSUPPORTED = "Not supported: refused unless it asks for nothing"


@dataclass(frozen=True, slots=True)
class Field:
    """`limits` are JSON Schema keywords beside the type; with a type among them they are the whole schema.

    `default` is what the field is without being given, where the engine's own default does not say it.
    """

    meaning: str
    limits: Schema = field(default_factory=dict)
    default: Any = None
    required: bool = False


_MESSAGES = {
    "type": "array",
    "minItems": 1,
    "items": {
        "type": "object",
        "properties": {
            "role": {"enum": list(ROLES)},
            "content": {
                "anyOf": [
                    {"type": "string"},
                    {
                        "type": "array",
                        "items": {
                            "type": "object",
                            "properties": {"type": {"const": "text"}, "text": {"type": "string"}},
                            "required": ["type", "text"],
                        },
                    },
                    {"type": "null"},
                ]
            },
        },
        "required": ["role"],
    },
}
_TOKEN_IDS = {"type": "array", "items": {"type": "integer", "minimum": 0}}
_TEXT = {"type": "string", "minLength": 1}
_STOP = {**_TEXT, "maxLength": MAX_STOP_LENGTH}
_PROMPT_IDS = {**_TOKEN_IDS, "minItems": 1}
_PROMPT = {
    "anyOf": [
        _TEXT,
        {"type": "array", "items": _TEXT, "minItems": 1, "maxItems": MAX_PROMPTS},
        _PROMPT_IDS,
        {"type": "array", "items": _PROMPT_IDS, "minItems": 1, "maxItems": MAX_PROMPTS},
    ]
}


def _between(low: float, high: float) -> Schema:
    return {"minimum": low, "maximum": high}


_BIASES = {
    "type": "object",
    "maxProperties": MAX_LOGIT_BIAS,
    "propertyNames": {"pattern": "^(0|[1-9][0-9]*)$"},
    "additionalProperties": {"type": "number", **_between(-100, 100)},
}
_BIAS = {"anyOf": [_BIASES["additionalProperties"], {"const": False}]}
_UNLIMITED_OR_ONE = {"anyOf": [{"const": -1}, {"type": "integer", "minimum": 1}]}

_GROUPS: dict[str, dict[str, Field]] = {
    "The call": {
        "messages": Field(
            "The conversation. `content` is a string or a list of text parts; null only for an assistant that called "
            "tools. `developer` is rendered as `system`. Text in it never becomes a control token.",
            _MESSAGES,
            required=True,
        ),
        "CompletionRequest.prompt": Field(
            f"A text, token ids, or up to {MAX_PROMPTS} of one kind. Control tokens written in a text are parsed.",
            _PROMPT,
            required=True,
        ),
        "LlamaRequest.prompt": Field(
            "A text or token ids. Control tokens written in a text are parsed.",
            {"anyOf": [_TEXT, _PROMPT_IDS]},
            required=True,
        ),
        "TokenizeRequest.prompt": Field("A text; either this or `messages` or `content`."),
        "TokenizeRequest.messages": Field("A conversation; either this or `prompt` or `content`.", _MESSAGES),
        "TokenizeRequest.content": Field("A text, as llama-server calls it; either this or `prompt` or `messages`."),
        "DetokenizeRequest.tokens": Field("Token ids.", _TOKEN_IDS, required=True),
        "model": Field("One of the served names. An unknown one is 404.", default="the model there is"),
        "LlamaRequest.n": Field("There is one answer.", {"enum": [None, 1]}),
        "n": Field("Answers to each prompt. They share one prefill.", _between(1, MAX_CHOICES), default=1),
        "stream": Field("Whether to answer with server-sent events.", default=False),
        "stream_options": Field("Only with `stream`."),
        "include_usage": Field("Whether the stream ends with a chunk of token counts.", default=False),
        "continuous_usage_stats": Field("With `include_usage`: counts in every chunk.", default=False),
        "priority": Field("Of those that wait, the lowest starts first.", default=0),
        "request_id": Field("A name for the call; it becomes part of `id`.", {"pattern": r"^[A-Za-z0-9_.:\-]{1,128}$"}),
    },
    "Length and end": {
        "max_tokens": Field(
            "Tokens to generate at most; 0 scores the prompt. More than fits is cut to what fits and ends with "
            "`length`.",
            {"minimum": 0},
            default="up to the context",
        ),
        "ChatRequest.max_tokens": Field(
            "Tokens to generate at most. More than fits is cut to what fits and ends with `length`.",
            {"minimum": 1},
            default="up to the context",
        ),
        "ChatRequest.max_completion_tokens": Field("The same; wins over `max_tokens`.", {"minimum": 1}),
        "max_completion_tokens": Field("The same; wins over `max_tokens`.", {"minimum": 0}),
        "ChatRequest.n_predict": Field(
            "llama-server's name for `max_tokens`, which wins; -1 is no limit.", _UNLIMITED_OR_ONE
        ),
        "n_predict": Field("llama-server's name for `max_tokens`, which wins; -1 is no limit.", {"minimum": -1}),
        "min_tokens": Field("No end-of-text token and no stop token before so many tokens.", {"minimum": 0}),
        "stop": Field(
            f"A string or up to {MAX_STOP_STRINGS}, each of up to {MAX_STOP_LENGTH} characters: the text ends before "
            "the first of them.",
            {"anyOf": [_STOP, {"type": "array", "items": _STOP, "maxItems": MAX_STOP_STRINGS}]},
        ),
        "stop_token_ids": Field(f"Up to {MAX_STOP_TOKENS} tokens that end the answer.", {"maxItems": MAX_STOP_TOKENS}),
        "ignore_eos": Field("Whether the end-of-text token does not end the answer."),
        "include_stop_str_in_output": Field("Whether the text keeps the stop string that ended it."),
    },
    "Sampling": {
        "temperature": Field("0 takes the likeliest token always.", {"minimum": 0}),
        "top_p": Field(
            "The smallest set of tokens that has this much probability; 0 takes the likeliest.", _between(0, 1)
        ),
        "top_k": Field("Only the k likeliest tokens; 0 and -1 are off.", {"minimum": -1}),
        "min_p": Field("Only tokens at least this likely, as a part of the likeliest.", _between(0, 1)),
        "typical_p": Field("Locally typical sampling; 1 is off.", _between(0, 1)),
        "repetition_penalty": Field(
            "Divides or multiplies the logits of tokens in the prompt and the answer; 1 is off.",
            {"exclusiveMinimum": 0},
        ),
        "repeat_penalty": Field("llama-server's name for `repetition_penalty`, which wins.", {"exclusiveMinimum": 0}),
        "repeat_last_n": Field("How many tokens the repetition penalty looks back; -1 is all.", {"minimum": -1}),
        "presence_penalty": Field("Subtracted once from tokens the answer has.", _between(-2, 2)),
        "frequency_penalty": Field("Subtracted per occurrence in the answer.", _between(-2, 2)),
        "LlamaRequest.seed": Field("Equal seed, equal answer. -1 is none.", default="drawn"),
        "seed": Field(
            "Equal seed, equal answer. Each choice reports the one it used.", default="drawn for each prompt"
        ),
        "LlamaRequest.logit_bias": Field(
            "Token id to what is added to its logit, or a list of pairs: a token id, or a text all of whose tokens are "
            f"meant, and a number, or false for never. Up to {MAX_LOGIT_BIAS}.",
            {
                "anyOf": [
                    {**_BIASES, "propertyNames": {"minLength": 1}, "additionalProperties": _BIAS},
                    {
                        "type": "array",
                        "maxItems": MAX_LOGIT_BIAS,
                        "items": {
                            "type": "array",
                            "prefixItems": [{"type": ["integer", "string"], "minimum": 0, "minLength": 1}, _BIAS],
                            "minItems": 2,
                            "maxItems": 2,
                        },
                    },
                ]
            },
        ),
        "logit_bias": Field(
            f"Token id to what is added to its logit, for up to {MAX_LOGIT_BIAS} tokens.",
            _BIASES,
        ),
        "allowed_token_ids": Field("Only these tokens, of which there must be one.", {"minItems": 1}),
        "bad_words": Field(
            f"Up to {MAX_BAD_WORDS} words of up to {MAX_BAD_WORD_LENGTH} characters that must not be completed, "
            f"{MAX_BAD_WORD_TOKENS} tokens in all.",
            {"type": "array", "items": {**_TEXT, "maxLength": MAX_BAD_WORD_LENGTH}, "maxItems": MAX_BAD_WORDS},
        ),
    },
    "What is reported": {
        "ChatRequest.logprobs": Field("Whether to report each token's log-probability.", default=False),
        "top_logprobs": Field(
            "With `logprobs`: how many of the likeliest tokens to report beside each.", _between(0, MAX_LOGPROBS)
        ),
        "CompletionRequest.logprobs": Field(
            "How many of the likeliest tokens to report beside each token.", _between(0, MAX_LOGPROBS)
        ),
        "prompt_logprobs": Field(
            "How many of the likeliest tokens to report beside each token of the prompt; in a stream with the first "
            "chunk.",
            _between(0, MAX_LOGPROBS),
        ),
        "CompletionRequest.echo": Field("Whether the text begins with the prompt's.", default=False),
        "n_probs": Field("How many of the likeliest tokens to report beside each token.", _between(0, MAX_LOGPROBS)),
        "return_tokens": Field("Whether to report the ids of an answer that is not streamed.", default=False),
        "with_pieces": Field("With `content`: whether to report the text of each token beside it.", default=False),
        "return_token_strs": Field("Whether to report the text of each token.", default=False),
        "return_token_ids": Field("Whether to report the ids of prompt and answer.", default=False),
        "timings_per_token": Field("In a stream: the timings so far in every chunk.", default=False),
        "return_progress": Field("In a stream: a chunk for each piece of the prompt that is computed.", default=False),
        "skip_special_tokens": Field("Whether control tokens are left out of the text."),
    },
    "The prompt": {
        "truncate_prompt_tokens": Field(
            "Keep only the last so many tokens of the prompt; -1: as many as leave room for the answer.",
            _UNLIMITED_OR_ONE,
        ),
        "add_generation_prompt": Field(
            "Whether the template opens the assistant's turn.", default="unless `continue_final_message`"
        ),
        "continue_final_message": Field("Whether the answer goes on inside the last message.", default=False),
        "chat_template_kwargs": Field("Variables for the model's template."),
        "chat_template_now": Field("What the template is told the time is, as ISO 8601.", default="the server's clock"),
        "add_special": Field("With `content`: whether it begins as the model's file says a text does.", default=False),
        "parse_special": Field("With `content`: whether control tokens written in it are parsed.", default=True),
        "add_special_tokens": Field(
            "False: no begin-of-text token, even if the model's file asks for one.", default=True
        ),
    },
}

_GROUPS[INERT] = {name: Field(reason) for name, reason in inert.TAKEN.items()}

_HARMLESS = inert.ASKS_FOR_NOTHING | {f"ChatRequest.{name}": values for name, values in chat.ASKS_FOR_NOTHING.items()}
_GROUPS[UNSUPPORTED] = {
    "LlamaRequest.prompt_logprobs": Field("In /v1/completions only.", {"enum": [None]}),
    "LlamaRequest.stream_options": Field("The last chunk always has the counts.", {"enum": [None]}),
    "CompletionRequest.add_special_tokens": Field("For another beginning send token ids.", {"enum": [None, True]}),
    "best_of": Field("Only the value of `n` is taken."),
    "suffix": Field("Only an empty one is taken.", {"maxLength": 0}),
} | {
    key: Field(WHAT_IS_NOT_SUPPORTED[key.rpartition(".")[2]], {"enum": [None, *harmless]})
    for key, harmless in _HARMLESS.items()
}

WRITTEN = {name: (group, written) for group, fields in _GROUPS.items() for name, written in fields.items()}
"""Heading and words for each field name, or Struct and field where it means something of its own there."""


def field_of(struct: str, name: str) -> tuple[str, Field] | None:
    """What is written of a field of the Struct called `struct`, below its heading; None if nothing is."""
    return WRITTEN.get(f"{struct}.{name}") or WRITTEN.get(name)


def place_of(struct: str, name: str) -> int:
    """Where among all fields a field of the Struct called `struct` stands; what is not written of comes last."""
    keys = list(WRITTEN)
    return next((keys.index(key) for key in (f"{struct}.{name}", name) if key in WRITTEN), len(keys))


def default_of(struct: str, name: str, written: Field) -> Any:
    """What a field of the Struct called `struct` is without being given; None if that is nothing worth saying."""
    if struct == llama.LlamaRequest.__name__ and name in llama.DEFAULTS:
        return llama.DEFAULTS[name]
    return _ENGINE_DEFAULTS.get(name) if written.default is None else written.default


_ENGINE_DEFAULTS = {
    parameter.name: parameter.default
    for parameter in msgspec.structs.fields(SamplingParams)
    if isinstance(parameter.default, bool | int | float)
}
