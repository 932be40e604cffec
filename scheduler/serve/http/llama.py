"""llama-server's own endpoints: POST /completion and GET /props."""

import importlib.metadata
import re
from typing import Any

import msgspec
from aiohttp import web

from engine.params import MAX_LOGIT_BIAS, SamplingParams
from scheduler.serve.call import Call
from scheduler.serve.http.app_keys import SERVING, SETTINGS
from scheduler.serve.http.body import json_response
from scheduler.serve.http.llama_form import LlamaForm
from scheduler.serve.http.respond import answer
from scheduler.serve.service import Service
from scheduler.serve.wire.decode import decode
from scheduler.serve.wire.errors import invalid
from scheduler.serve.wire.llama import (
    DEFAULTS,
    HIGHEST_BIAS,
    LOWEST_BIAS,
    DefaultSettings,
    LlamaRequest,
    LlamaSampling,
    Modalities,
    Props,
)

_TOKEN_ID = re.compile(r"[0-9]{1,18}")
_DECODER = msgspec.json.Decoder(LlamaRequest)


async def completion(request: web.Request) -> web.StreamResponse:
    """Text that goes on from a prompt, whole or streamed, in llama-server's own form."""
    return await answer(request, llama_form)


def llama_form(service: Service, body: bytes) -> LlamaForm:
    """The form in which the call in `body` is to be answered. In the pool.

    Raises `ApiError` or `ParamError` for whatever cannot be answered.
    """
    fields = decode(body, _DECODER)
    fields.logit_bias = logit_bias_of(fields.logit_bias, service)
    fields.check()
    model = service.model_name(fields.model)
    params = fields.sampling_params(
        logprobs=fields.n_probs or None,
        prompt_logprobs=None,
        vocab_size=service.tokenizer.vocab_size,
        encode=service.encode_plain,
    )
    given = fields.given_prompt
    limited = fields.truncate_prompt_tokens is None
    ids = service.ids_of_text(given, limited=limited) if isinstance(given, str) else tuple(given)
    prompt = service.check_prompt(fields, ids, param="prompt")
    fields.return_token_ids = fields.return_tokens or fields.return_token_ids
    call = Call.of(fields, operation="text_completion", prefix="cmpl", model=model, prompts=[prompt], params=params)
    return LlamaForm(call, service, prompt=service.tokenizer.decode(prompt, skip_special=False))


def logit_bias_of(value: Any, service: Service) -> dict[int, float] | None:
    """llama-server's two forms of `logit_bias` as token ids and numbers. In the pool. Raises `ApiError`."""
    if value is None:
        return None
    pairs = value.items() if isinstance(value, dict) else value
    if not isinstance(pairs, list) and not isinstance(value, dict):
        raise invalid("logit_bias", "logit_bias must be an object or a list of pairs")
    if len(pairs) > MAX_LOGIT_BIAS:
        raise invalid("logit_bias", f"logit_bias may have {MAX_LOGIT_BIAS} entries, got {len(pairs)}")
    biases: dict[int, float] = {}
    for pair in pairs:
        if not isinstance(pair, list | tuple) or len(pair) != 2:
            raise invalid("logit_bias", "logit_bias: each entry must be a pair of a token or a text and a number")
        token, bias = pair
        if bias is False:
            bias = LOWEST_BIAS
        if isinstance(bias, bool) or not isinstance(bias, int | float) or not LOWEST_BIAS <= bias <= HIGHEST_BIAS:
            limits = f"[{LOWEST_BIAS}, {HIGHEST_BIAS}]"
            raise invalid("logit_bias", f"logit_bias: a bias must be a number in {limits}, or false")
        for token_id in _ids_of_token(token, service):
            biases[token_id] = bias
    return biases


def _ids_of_token(token: Any, service: Service) -> list[int]:
    if type(token) is int:
        return [token]
    if not isinstance(token, str) or not token:
        raise invalid("logit_bias", "logit_bias: a token must be an id or a text")
    return [int(token)] if _TOKEN_ID.fullmatch(token) else service.encode_plain(token)


async def props(request: web.Request) -> web.Response:
    """What is served: the model, its template and special tokens, the slots and their context."""
    service = request.app[SERVING].get()
    return json_response(
        Props(
            default_generation_settings=DefaultSettings(
                params=LlamaSampling.of(SamplingParams(**DEFAULTS)), n_ctx=service.model.max_len
            ),
            total_slots=len(service.engine.slots()),
            model_alias=service.model.names[0],
            model_path=request.app[SETTINGS].file_name,
            modalities=Modalities(),
            chat_template=service.template_source,
            bos_token=service.token_name(service.tokenizer.bos_id),
            eos_token=service.token_name(service.tokenizer.eos_id),
            build_info=f"lockstep {importlib.metadata.version('lockstep-llm')}",
            system_fingerprint=service.model.fingerprint,
        )
    )
