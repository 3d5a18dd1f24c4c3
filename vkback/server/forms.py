"""Endpoints of other APIs for conversations: OpenAI's responses, Anthropic's messages. Each request becomes that of a chat."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Protocol

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from vkback.api import Result
from vkback.api.model import ChatPrompt
from vkback.server import schema
from vkback.server.anthropic_messages import CountRequest, MessageShape, MessagesRequest
from vkback.server.replies import ReplyShape
from vkback.server.responses import KeptResponses, ResponseRequest, ResponseShape
from vkback.server.worker import Worker


class Answering(Protocol):
    """What the server gives its endpoints."""

    worker: Worker

    def authorize(self, request: Request) -> None: ...

    async def parsed(self, request: Request, kind: type[Any]) -> Any: ...

    async def composed(self, asked: schema.ChatRequest) -> ChatPrompt: ...

    async def answer_chat(
        self, request: Request, asked: schema.ChatRequest, shape: Callable[[ChatPrompt], ReplyShape] | None = None
    ) -> Response: ...


class OtherForms:
    """The endpoints."""

    def __init__(self, server: Answering) -> None:
        self._server, self._kept = server, KeptResponses()

    async def responses(self, request: Request) -> Response:
        server = self._server
        asked: ResponseRequest = await server.parsed(request, ResponseRequest)
        before = self._kept.conversation(asked.previous_response_id) if asked.previous_response_id is not None else []
        chat = asked.as_chat(before)

        def keep(body: dict[str, Any], message: dict[str, Any]) -> None:
            if asked.store is not False:
                self._kept.keep(body, [*before, *asked.conversation(), message])

        def shape(prompt: ChatPrompt) -> ReplyShape:
            return ResponseShape(asked, server.worker.model_name, partial(prompt.reader, thoughts=chat.reads_thoughts), keep)

        return await server.answer_chat(request, chat, shape)

    async def response(self, request: Request) -> Response:
        """One that is kept; DELETE forgets it."""
        self._server.authorize(request)
        id = request.path_params["id"]
        if request.method == "DELETE":
            self._kept.forget(id)
            return JSONResponse({"id": id, "object": "response.deleted", "deleted": True})
        return JSONResponse(self._kept.body(id))

    async def messages(self, request: Request) -> Response:
        server = self._server
        asked: MessagesRequest = await server.parsed(request, MessagesRequest)
        chat = asked.as_chat()

        def ended_by(result: Result) -> str | None:
            """The stop string that is in the tokens, of which the text has nothing."""
            whole = server.worker.tokenizer.decode(result.tokens, special=True)
            return min((s for s in asked.stop_sequences or [] if s in whole), key=whole.find, default=None)

        def shape(prompt: ChatPrompt) -> ReplyShape:
            reader = partial(prompt.reader, thoughts=chat.reads_thoughts)
            return MessageShape(server.worker.model_name, len(prompt.ids), reader, ended_by)

        return await server.answer_chat(request, chat, shape)

    async def count_tokens(self, request: Request) -> Response:
        asked: CountRequest = await self._server.parsed(request, CountRequest)
        prompt = await self._server.composed(schema.ChatRequest.model_validate(asked.body()))
        return JSONResponse({"input_tokens": len(prompt.ids)})
