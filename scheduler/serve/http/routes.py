"""The HTTP application: which path is answered by what, and every failure in one envelope."""

import functools
import importlib.metadata
from urllib.parse import quote

import structlog
from aiohttp import hdrs, web
from aiohttp.typedefs import Handler

from scheduler.serve import prometheus
from scheduler.serve.http.app_keys import SERVING, SETTINGS, Serving
from scheduler.serve.http.body import check_announced, deliver, json_response
from scheduler.serve.http.chat import chat_form
from scheduler.serve.http.completions import completion_form
from scheduler.serve.http.docs import page
from scheduler.serve.http.docs.openapi import openapi_document
from scheduler.serve.http.llama import completion, props
from scheduler.serve.http.nearest import nearest
from scheduler.serve.http.protocol import error_response
from scheduler.serve.http.requests import delete_request, request_state
from scheduler.serve.http.respond import answer
from scheduler.serve.http.route import Route
from scheduler.serve.http.security import cors_headers, guard
from scheduler.serve.http.tokens import apply_template, detokenize, render, tokenize
from scheduler.serve.keys import ApiKeys
from scheduler.serve.logs import log_refused
from scheduler.serve.settings import ServeSettings
from scheduler.serve.wire.chat import ChatChunk, ChatCompletion, ChatRequest
from scheduler.serve.wire.completions import Completion, CompletionRequest
from scheduler.serve.wire.encode import encode_json
from scheduler.serve.wire.errors import REFUSALS, ApiError, as_api_error, internal_error, unavailable
from scheduler.serve.wire.info import (
    Load,
    ModelCard,
    ModelList,
    SlotState,
    Status,
    Version,
    WorkerLoad,
)
from scheduler.serve.wire.llama import LlamaAnswer, LlamaRequest, Props
from scheduler.serve.wire.requests import RequestDeleted, RequestState
from scheduler.serve.wire.tokens import (
    Detokenized,
    DetokenizeRequest,
    RenderedIds,
    RenderedPrompt,
    TemplateRequest,
    Tokenized,
    TokenizeRequest,
)

LONGEST_LOGGED_PATH = 128
"""Of a path there is nothing at; it is logged percent-encoded."""


def routing_table() -> tuple[Route, ...]:
    """Every path there is."""
    calls = (404, 429, 500, 504)
    return (
        Route(
            "POST",
            "/v1/chat/completions",
            chat_completions,
            takes=ChatRequest,
            gives=ChatCompletion,
            streams=(ChatChunk,),
            refusals=calls,
        ),
        Route(
            "POST",
            "/v1/completions",
            completions,
            takes=CompletionRequest,
            gives=Completion,
            streams=(Completion,),
            refusals=calls,
        ),
        Route("POST", "/v1/embeddings", embeddings, refusals=(501,)),
        Route("GET", "/v1/models", models, gives=ModelList),
        Route("GET", "/v1/models/{name:.+}", model, gives=ModelCard, refusals=(404,)),
        Route("POST", "/v1/chat/completions/render", render, takes=ChatRequest, gives=RenderedIds, refusals=(404,)),
        Route(
            "POST",
            "/completion",
            completion,
            takes=LlamaRequest,
            gives=LlamaAnswer,
            streams=(LlamaAnswer,),
            refusals=calls,
        ),
        Route("GET", "/v1/requests/{id}", request_state, gives=RequestState, refusals=(404,)),
        Route("DELETE", "/v1/requests/{id}", delete_request, gives=RequestDeleted),
        Route("POST", "/tokenize", tokenize, takes=TokenizeRequest, gives=Tokenized, refusals=(404,)),
        Route("POST", "/detokenize", detokenize, takes=DetokenizeRequest, gives=Detokenized, refusals=(404,)),
        Route("POST", "/apply-template", apply_template, takes=TemplateRequest, gives=RenderedPrompt, refusals=(404,)),
        Route("GET", "/health", health, gives=Status),
        Route("GET", "/ping", health, gives=Status),
        Route("POST", "/ping", health, gives=Status),
        Route("GET", "/load", load, gives=Load),
        Route("GET", "/get_load", worker_load, gives=WorkerLoad),
        Route("GET", "/metrics", metrics, gives=str, media_type="text/plain"),
        Route("GET", "/slots", slots, gives=list[SlotState]),
        Route("GET", "/props", props, gives=Props),
        Route("GET", "/version", version, gives=Version),
        Route("GET", "/openapi.json", openapi, gives=dict),
        Route("GET", "/docs", docs, gives=str, media_type="text/html"),
    )


def build_app(serving: Serving, settings: ServeSettings, keys: ApiKeys) -> web.Application:
    """The application. It answers from the start; `serving` gets its service when the model is loaded.

    Run it with `protocol.Runner`, so that clients that go away are noticed.
    """
    app = web.Application(middlewares=[_delivery, _failures, guard(settings, keys)], client_max_size=settings.max_body)
    app[SERVING] = serving
    app[SETTINGS] = settings
    app.on_response_prepare.append(_add_headers)
    for route in routing_table():
        resource = app.router.add_resource(route.path)
        for verb in (route.method, "HEAD") if route.method == "GET" else (route.method,):
            resource.add_route(verb, route.handler, expect_handler=_expect)
    return app


async def chat_completions(request: web.Request) -> web.StreamResponse:
    """The assistant's answer to a conversation, whole or streamed."""
    return await answer(request, chat_form)


async def completions(request: web.Request) -> web.StreamResponse:
    """Text that goes on from a prompt, or one for each of several prompts, whole or streamed."""
    return await answer(request, completion_form)


async def embeddings(_request: web.Request) -> web.StreamResponse:
    """Nothing yet: embeddings are not implemented, and every call says so."""
    raise ApiError(501, "embeddings are not implemented: this server generates text only", code="not_implemented")


async def models(request: web.Request) -> web.Response:
    """Every name the model answers to."""
    service = request.app[SERVING].get()
    return json_response(ModelList(data=[service.model_card(name) for name in service.model.names]))


async def model(request: web.Request) -> web.Response:
    """What is known of the model under one of its names."""
    service = request.app[SERVING].get()
    return json_response(service.model_card(service.model_name(request.match_info["name"])))


async def health(request: web.Request) -> web.Response:
    """Whether a request would be taken in: 200, else 503."""
    if request.app[SERVING].get().engine.is_draining:
        raise unavailable("the server is shutting down")
    return json_response(Status(status="ok"))


async def metrics(request: web.Request) -> web.Response:
    """The counters, gauges and histograms in Prometheus' text format."""
    body = request.app[SERVING].get().exposition.render()
    return web.Response(body=body, headers={hdrs.CONTENT_TYPE: prometheus.CONTENT_TYPE})


async def slots(request: web.Request) -> web.Response:
    """State and counts of every slot. With `?fail_on_no_slot=1` it is 503 if none is idle."""
    service = request.app[SERVING].get()
    views = service.engine.slots()
    if request.query.get("fail_on_no_slot") and all(view.request_id is not None for view in views):
        raise unavailable("no slot is idle")
    return json_response([SlotState.of(view, service.model.max_len) for view in views])


async def load(request: web.Request) -> web.Response:
    """How many requests have been taken in and are not finished."""
    return json_response(Load(server_load=request.app[SERVING].get().engine.num_unfinished))


async def worker_load(request: web.Request) -> web.Response:
    """How many requests are unfinished, under the name that routers ask for."""
    return json_response(WorkerLoad(load=request.app[SERVING].get().engine.num_unfinished))


async def version(_request: web.Request) -> web.Response:
    """The version of the server."""
    return json_response(Version(version=importlib.metadata.version("lockstep-llm")))


async def openapi(_request: web.Request) -> web.Response:
    """This interface as an OpenAPI document."""
    document, _ = _documents()
    return web.Response(body=document, content_type="application/json")


async def docs(_request: web.Request) -> web.Response:
    """This interface as a page to read."""
    _, html = _documents()
    return web.Response(body=html, content_type="text/html", charset="utf-8", headers=page.HEADERS)


@functools.cache
def _documents() -> tuple[bytes, bytes]:
    document = openapi_document(routing_table())
    return encode_json(document), page.render(document).encode()


@web.middleware
async def _delivery(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Send what is not a stream, here, where a client that does not read it can be given up."""
    response = await handler(request)
    if not response.prepared:
        await response.prepare(request)
        await deliver(request, response.write_eof(), request.app[SETTINGS].write_timeout)
    return response


@web.middleware
async def _failures(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Every failure that comes before an answer, in the envelope."""
    try:
        return await handler(request)
    except web.HTTPException as error:
        return _refusal(request, _of_aiohttp(request, error))
    except REFUSALS as error:
        return _refusal(request, as_api_error(error))
    except ConnectionError:
        raise
    except Exception:  # noqa: BLE001 - logged; a client gets an envelope, never a traceback
        structlog.get_logger("lockstep.http").exception("handler failed", method=request.method, path=request.path)
        return error_response(internal_error())


def _refusal(request: web.Request, error: ApiError) -> web.Response:
    """The answer `error`, which leaves a line in the log."""
    resource = request.match_info.route.resource
    path = quote(request.path, errors="replace")[:LONGEST_LOGGED_PATH] if resource is None else resource.canonical
    log_refused(error, path)
    return error_response(error)


def _of_aiohttp(request: web.Request, error: web.HTTPException) -> ApiError:
    """What the router says in our words."""
    match error:
        case web.HTTPMethodNotAllowed():
            allow = ", ".join(sorted(error.allowed_methods))
            message = f"{request.method} is not allowed here, only {allow}"
            return ApiError(405, message, code="method_not_allowed", headers={"Allow": allow})
        case web.HTTPNotFound():
            return ApiError(404, f"there is nothing at {request.path}{_hint(request)}", code="not_found")
        case _:
            return ApiError(error.status, error.reason.lower())


def _hint(request: web.Request) -> str:
    known = (resource.canonical for resource in request.app.router.resources())
    meant = nearest(request.path, (path for path in known if "{" not in path))
    return ", see /docs for what there is" if meant is None else f", did you mean {meant}?"


async def _expect(request: web.Request) -> web.StreamResponse | None:
    """Let the client send its body, unless it is one that would be refused or expects what we do not know."""
    if request.headers[hdrs.EXPECT].lower() != "100-continue":
        error = ApiError(417, "of all expectations only 100-continue is known", code="expectation_failed")
        return _refusal(request, error)
    try:
        check_announced(request)
    except ApiError as error:
        return _refusal(request, error)
    await request.writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
    return None


async def _add_headers(request: web.Request, response: web.StreamResponse) -> None:
    response.headers[hdrs.SERVER] = "lockstep"
    response.headers.update(cors_headers(request, request.app[SETTINGS]))
