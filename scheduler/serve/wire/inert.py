"""Fields other servers know and this one does not act upon.

Some change nothing wherever they are known: they are taken. The others would change the answer: declared all the same,
so that a value that asks for something is refused by name and one that asks for nothing is taken.
"""

import json
from typing import Any

import msgspec

from scheduler.serve.wire.errors import invalid
from scheduler.serve.wire.sampling import GenerationFields

TAKEN = {
    "cache_prompt": "Nothing is cached from one request to the next, and no answer would depend on it.",
    "cache_salt": "Nothing is cached from one request to the next.",
    "include_reasoning": "No part of an answer is told apart as reasoning.",
    "metadata": "The client's own.",
    "n_cache_reuse": "Nothing is cached from one request to the next.",
    "n_keep": "What to keep of a full context: an answer ends with the context.",
    "parallel_tool_calls": "Without tools there are no calls.",
    "prompt_cache_key": "Nothing is cached from one request to the next.",
    "prompt_cache_retention": "Nothing is cached from one request to the next.",
    "reasoning_format": "No part of an answer is told apart as reasoning.",
    "safety_identifier": "The client's own.",
    "service_tier": "There is one.",
    "session_id": "The client's own.",
    "spaces_between_special_tokens": "Tokens are joined byte by byte, with nothing between them.",
    "sse_ping_interval": "The server has `--sse-ping`.",
    "store": "Nothing is stored.",
    "user": "The client's own.",
}
"""Fields that may have any value, and why they change nothing."""

ASKS_FOR_NOTHING: dict[str, tuple[object, ...]] = {
    "adaptive_target": (-1,),
    "dry_multiplier": (0,),
    "dynatemp_range": (0,),
    "ec_transfer_params": (),
    "grammar": ("",),
    "guided_choice": (),
    "guided_grammar": (),
    "guided_json": (),
    "guided_regex": (),
    "id_slot": (-1,),
    "image_data": ([],),
    "json_schema": (),
    "kv_transfer_params": (),
    "length_penalty": (1,),
    "logits_processors": ([],),
    "logprob_token_ids": (),
    "lora": ([],),
    "min_keep": (0,),
    "mirostat": (0,),
    "n_cmpl": (1,),
    "n_indent": (0,),
    "post_sampling_probs": (False,),
    "prompt_embeds": (),
    "repetition_detection": (),
    "response_fields": ([],),
    "response_format": ({"type": "text"},),
    "return_tokens_as_token_ids": (False,),
    "samplers": (),
    "structured_outputs": (),
    "t_max_predict_ms": (0,),
    "top_n_sigma": (-1,),
    "truncation_side": ("left",),
    "use_beam_search": (False,),
    "vllm_xargs": ({},),
    "watermarking": (False,),
    "xtc_probability": (0,),
}
"""Fields with the values (besides null) that change nothing."""


class InertFields(GenerationFields, kw_only=True):
    """Fields of a call that have no effect: `TAKEN`, and those refused unless the value is in `ASKS_FOR_NOTHING`."""

    cache_prompt: object = None
    cache_salt: object = None
    include_reasoning: object = None
    metadata: object = None
    n_cache_reuse: object = None
    n_keep: object = None
    parallel_tool_calls: object = None
    prompt_cache_key: object = None
    prompt_cache_retention: object = None
    reasoning_format: object = None
    safety_identifier: object = None
    service_tier: object = None
    session_id: object = None
    spaces_between_special_tokens: object = None
    sse_ping_interval: object = None
    store: object = None
    user: object = None

    adaptive_target: object = None
    dry_multiplier: object = None
    dynatemp_range: object = None
    ec_transfer_params: object = None
    grammar: object = None
    guided_choice: object = None
    guided_grammar: object = None
    guided_json: object = None
    guided_regex: object = None
    id_slot: object = None
    image_data: object = None
    json_schema: object = None
    kv_transfer_params: object = None
    length_penalty: object = None
    logits_processors: object = None
    logprob_token_ids: object = None
    lora: object = None
    min_keep: object = None
    mirostat: object = None
    n_cmpl: object = None
    n_indent: object = None
    post_sampling_probs: object = None
    prompt_embeds: object = None
    repetition_detection: object = None
    response_fields: object = None
    response_format: object = None
    return_tokens_as_token_ids: object = None
    samplers: object = None
    structured_outputs: object = None
    t_max_predict_ms: object = None
    top_n_sigma: object = None
    truncation_side: object = None
    use_beam_search: object = None
    vllm_xargs: object = None
    watermarking: object = None
    xtc_probability: object = None

    def check(self) -> None:
        """Raise `ApiError` for values no Struct type and no `SamplingParams` refuses."""
        super().check()
        refuse_unsupported(self, ASKS_FOR_NOTHING)


def refuse_unsupported(fields: msgspec.Struct, asks_for_nothing: dict[str, tuple[Any, ...]]) -> None:
    """Raise `ApiError` naming the first field whose value is neither null nor one of those that ask for nothing."""
    for name, harmless in asks_for_nothing.items():
        value = getattr(fields, name)
        if value is not None and not any(_is_same(value, other) for other in harmless):
            taken = " or ".join(json.dumps(other) for other in harmless if other)
            message = f"the parameter {name} is not supported yet" + (f", only {taken} is taken" if taken else "")
            raise invalid(name, message, code="unsupported_parameter")


def _is_same(value: object, other: object) -> bool:
    """Whether two JSON values are equal: 0 is 0.0, but it is not false."""
    return value == other and isinstance(value, bool) is isinstance(other, bool)
