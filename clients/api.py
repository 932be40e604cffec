"""An async client of any OpenAI-compatible server over HTTP. It starts fast: no engine, no numpy."""

import contextlib
import json
import ssl
from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence
from types import TracebackType
from typing import Any, Self

import aiohttp

from clients.errors import ClientError, ServerError, UnreachableError
from clients.sse import EventParser

DEFAULT_URL = "http://127.0.0.1:8000"
CONNECT_TIMEOUT_S = 10.0

Json = dict[str, Any]
Message = Mapping[str, Any]
Prompt = str | Sequence[str] | Sequence[int] | Sequence[Sequence[int]]


class LockstepClient:
    """An async context manager. Whatever goes wrong is a `ClientError`: `UnreachableError` or `ServerError`.

    An answer may take as long as it takes; to give one up, cancel the task, or close the stream (`contextlib.aclosing`
    around it): the server then stops at once.
    """

    def __init__(self, base_url: str = DEFAULT_URL, api_key: str | None = None) -> None:
        """`base_url` may end with `/v1` or not."""
        url = base_url if "://" in base_url else f"http://{base_url}"
        self.base_url = url.rstrip("/").removesuffix("/v1")
        self._headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self._session: aiohttp.ClientSession | None = None
        self._fresh_session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> Self:
        self._session = self._new_session(aiohttp.TCPConnector(limit=0))
        self._fresh_session = self._new_session(aiohttp.TCPConnector(limit=0, force_close=True))
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._session is not None
        assert self._fresh_session is not None
        await self._session.close()
        await self._fresh_session.close()

    def _new_session(self, connector: aiohttp.BaseConnector) -> aiohttp.ClientSession:
        return aiohttp.ClientSession(
            headers=self._headers,
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_TIMEOUT_S),
            connector=connector,
        )

    async def health(self) -> bool:
        """Whether the server is ready: False while it loads its model."""
        async with self._request("GET", "/health") as response:
            return response.status == 200

    async def models(self) -> list[str]:
        """The names of the models served, the default one first."""
        answer = await self._json("GET", "/v1/models")
        return [model["id"] for model in answer["data"]]

    async def default_model(self) -> str:
        """The name of the first model served. Raises `ServerError` if there is none."""
        names = await self.models()
        if not names:
            raise ServerError(f"{self.base_url} serves no model")
        return names[0]

    async def chat(self, messages: Sequence[Message], **fields: Any) -> Json:
        """The answer of `POST /v1/chat/completions`; `fields` are further fields of the request."""
        return await self._json("POST", "/v1/chat/completions", {"messages": messages, **fields})

    async def complete(self, prompt: Prompt, **fields: Any) -> Json:
        """The answer of `POST /v1/completions`; `fields` are further fields of the request."""
        return await self._json("POST", "/v1/completions", {"prompt": prompt, **fields})

    def stream_chat(self, messages: Sequence[Message], **fields: Any) -> AsyncGenerator[Json, None]:
        """The chunks of `POST /v1/chat/completions` as they come."""
        return self._stream("/v1/chat/completions", {"messages": messages, **fields})

    def stream_complete(self, prompt: Prompt, **fields: Any) -> AsyncGenerator[Json, None]:
        """The chunks of `POST /v1/completions` as they come."""
        return self._stream("/v1/completions", {"prompt": prompt, **fields})

    async def _json(self, method: str, path: str, body: Json | None = None) -> Json:
        async with self._request(method, path, body) as response:
            await _raise_for_error(response)
            answer: Json = await response.json(content_type=None)
            return answer

    async def _stream(self, path: str, body: Json) -> AsyncGenerator[Json, None]:
        parser = EventParser()
        async with self._request("POST", path, {**body, "stream": True}) as response:
            await _raise_for_error(response)
            async for piece in response.content.iter_any():
                for data in parser.feed(piece):
                    if data == "[DONE]":
                        return
                    chunk: Json = json.loads(data)
                    if "error" in chunk:
                        raise _server_error(chunk["error"], None)
                    yield chunk
        raise UnreachableError(f"{self.base_url}: the stream ended before its [DONE]")

    @contextlib.asynccontextmanager
    async def _request(self, method: str, path: str, body: Json | None = None) -> AsyncIterator[aiohttp.ClientResponse]:
        try:
            async with await self._response(method, path, body) as response:
                yield response
        except (aiohttp.InvalidURL, aiohttp.NonHttpUrlClientError) as error:
            raise ClientError(f"{self.base_url} is not the URL of a server") from error
        except aiohttp.ClientConnectorCertificateError as error:
            fault = error.certificate_error
            why = fault.verify_message if isinstance(fault, ssl.SSLCertVerificationError) else str(fault)
            raise UnreachableError(
                f"the certificate of {self.base_url} is refused: {why} (SSL_CERT_FILE names a file of trusted ones)"
            ) from error
        except aiohttp.ClientConnectorSSLError as error:
            raise UnreachableError(f"{self.base_url} speaks no TLS that is understood here: is it http?") from error
        except (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError) as error:
            raise UnreachableError(
                f"no server at {self.base_url} (start one with `lockstep serve`, or name its address with --url)"
            ) from error
        except (aiohttp.ClientError, json.JSONDecodeError) as error:
            raise UnreachableError(f"{self.base_url}: {error or type(error).__name__}") from error

    async def _response(self, method: str, path: str, body: Json | None) -> aiohttp.ClientResponse:
        """The response; if a kept connection turns out to be closed, it is asked for once more, on a new connection.

        Not on the next one that was kept: a server that closes one has often closed them all.
        """
        assert self._session is not None, "use `async with LockstepClient(...)`"
        assert self._fresh_session is not None
        try:
            return await self._session.request(method, self.base_url + path, json=body)
        except aiohttp.ClientConnectorError:
            raise
        except (aiohttp.ClientOSError, aiohttp.ServerDisconnectedError):
            return await self._fresh_session.request(method, self.base_url + path, json=body)


async def _raise_for_error(response: aiohttp.ClientResponse) -> None:
    if response.status < 400:
        return
    text = await response.text(errors="replace")
    try:
        details = json.loads(text)["error"]
    except (ValueError, KeyError, TypeError):
        details = text.strip() or response.reason
    raise _server_error(details, response.status)


def _server_error(details: Any, status: int | None) -> ServerError:
    """The error in OpenAI's envelope, or whatever else a server sent instead."""
    if not isinstance(details, dict):
        return ServerError(str(details), status=status)
    message = str(details.get("message") or details)
    return ServerError(message, status=status, param=details.get("param"), code=details.get("code"))
