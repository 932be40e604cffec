"""POST /tokenize, /detokenize, /apply-template and /v1/chat/completions/render: what a prompt is, without an answer."""

import msgspec
from aiohttp import web

from engine.params import check_token_ids
from scheduler.serve.http.app_keys import SERVING
from scheduler.serve.http.body import json_response, read_body
from scheduler.serve.http.chat import chat_form
from scheduler.serve.service import Service, TokenIds, time_for
from scheduler.serve.wire.decode import decode
from scheduler.serve.wire.errors import invalid
from scheduler.serve.wire.logprobs import token_text
from scheduler.serve.wire.prompt import ids_of_json
from scheduler.serve.wire.tokens import (
    Detokenized,
    DetokenizeRequest,
    RenderedIds,
    RenderedPrompt,
    TemplateRequest,
    Tokenized,
    TokenizeRequest,
    TokenPiece,
)

_TOKENIZE = msgspec.json.Decoder(TokenizeRequest)
_DETOKENIZE = msgspec.json.Decoder(DetokenizeRequest)
_TEMPLATE = msgspec.json.Decoder(TemplateRequest)


async def tokenize(request: web.Request) -> web.Response:
    """The ids of a text or of a rendered conversation."""
    service = request.app[SERVING].get()
    return json_response(await service.in_background(_tokenized, service, await read_body(request)))


def _tokenized(service: Service, body: bytes) -> Tokenized:
    fields = decode(body, _TOKENIZE)
    service.model_name(fields.model)
    ids = _ids(service, fields)
    tokenized = Tokenized(tokens=list(ids), count=len(ids), max_model_len=service.model.max_len)
    token_bytes = service.tokenizer.token_bytes
    if fields.content is not None and fields.with_pieces:
        tokenized.tokens = [TokenPiece(id=token_id, piece=_piece(token_bytes(token_id))) for token_id in ids]
    if fields.return_token_strs:
        tokenized.token_strs = [token_text(token_bytes(token_id)) for token_id in ids]
    return tokenized


def _ids(service: Service, fields: TokenizeRequest) -> TokenIds:
    if (fields.prompt, fields.messages, fields.content).count(None) != 2:
        raise invalid("prompt", "one of prompt, messages and content is needed")
    if fields.messages is not None:
        return service.ids_of_chat(fields, now=time_for(fields), limited=False)
    if fields.content is not None:
        add_bos = None if fields.add_special else False
        parse_special = fields.parse_special is not False
        return service.ids_of_text(fields.content, limited=False, add_bos=add_bos, parse_special=parse_special)
    assert fields.prompt is not None
    add_bos = False if fields.add_special_tokens is False else None
    return service.ids_of_text(fields.prompt, limited=False, add_bos=add_bos)


def _piece(data: bytes) -> str | list[int]:
    try:
        return data.decode()
    except UnicodeDecodeError:
        return list(data)


async def detokenize(request: web.Request) -> web.Response:
    """The text of token ids, control tokens included."""
    service = request.app[SERVING].get()
    return json_response(await service.in_background(_detokenized, service, await read_body(request)))


def _detokenized(service: Service, body: bytes) -> Detokenized:
    fields = decode(body, _DETOKENIZE)
    service.model_name(fields.model)
    ids = ids_of_json(fields.tokens, "tokens")
    service.check_count(ids, param="tokens")
    check_token_ids("tokens", ids, service.tokenizer.vocab_size)
    text = service.tokenizer.decode(ids, skip_special=False)
    return Detokenized(prompt=text, content=text)


async def apply_template(request: web.Request) -> web.Response:
    """A conversation as the chat template writes it: for people, and for llama-server's clients."""
    service = request.app[SERVING].get()
    return json_response(await service.in_background(_templated, service, await read_body(request)))


def _templated(service: Service, body: bytes) -> RenderedPrompt:
    fields = decode(body, _TEMPLATE)
    service.model_name(fields.model)
    return RenderedPrompt(prompt=service.rendered_chat(fields, now=time_for(fields), limited=False).text)


async def render(request: web.Request) -> web.Response:
    """The token ids of the prompt that the same body would have as a chat completion, which is checked like one."""
    service = request.app[SERVING].get()
    return json_response(await service.in_background(_rendered, service, await read_body(request)))


def _rendered(service: Service, body: bytes) -> RenderedIds:
    call = chat_form(service, body).call
    (request,) = call.requests
    assert call.chat_template_now is not None
    room = service.model.max_len - len(request.prompt_ids)
    limit = request.params.max_tokens
    return RenderedIds(
        request_id=call.id,
        model=call.model,
        token_ids=request.prompt_ids,
        max_tokens=room if limit is None else min(room, limit),
        priority=request.priority,
        chat_template_now=call.chat_template_now,
    )
