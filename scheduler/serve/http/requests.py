"""GET and DELETE /v1/requests/{id}. The id is a whole one: that of the answer, or the `request_id` of the body."""

from aiohttp import web

from scheduler.serve.http.app_keys import SERVING
from scheduler.serve.http.body import json_response
from scheduler.serve.wire.errors import ApiError
from scheduler.serve.wire.requests import RequestDeleted, RequestState


async def request_state(request: web.Request) -> web.Response:
    """Where a call is that has not been answered yet: its state, its place in the queue, what it waits for."""
    service, call_id = request.app[SERVING].get(), request.match_info["id"]
    views = [service.engine.view(request_id) for request_id in service.calls.get(call_id, ())]
    unfinished = [view for view in views if view is not None]
    if not unfinished:
        raise ApiError(404, f"no unfinished request has the id {call_id!r}", param="id", code="request_not_found")
    return json_response(RequestState.of(call_id, unfinished))


async def delete_request(request: web.Request) -> web.Response:
    """End a call: who waits for it gets what there is, with `abort` as the reason. Doing so again changes nothing."""
    service, call_id = request.app[SERVING].get(), request.match_info["id"]
    aborted = [service.engine.abort(request_id) for request_id in service.calls.get(call_id, ())]
    return json_response(RequestDeleted(id=call_id, aborted=any(aborted)))
