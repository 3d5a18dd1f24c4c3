"""Endpoints that need no turn on the device: texts to tokens and back, conversations to texts, and what is served."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

from pydantic import BaseModel
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from vkback.api.model import ChatPrompt
from vkback.api.options import GenerateOptions, Options
from vkback.engine.sampler import SAMPLERS
from vkback.gguf.vocabularies import TokenizerError
from vkback.server import schema
from vkback.server.errors import BadRequest
from vkback.server.worker import Worker

RequestT = TypeVar("RequestT", bound=BaseModel)


class Texts:
    """`parsed` gives the body of a request, authorized and checked; `composed` the prompt of a chat; `authorize` refuses a wrong key."""

    def __init__(
        self,
        worker: Worker,
        authorize: Callable[[Request], None],
        parsed: Callable[[Request, type[Any]], Awaitable[Any]],
        composed: Callable[[schema.ChatRequest], Awaitable[ChatPrompt]],
        template: str | None,
        defaults: GenerateOptions,
    ) -> None:
        self._defaults = defaults
        self._worker, self._authorize, self._parsed, self._composed, self._template = worker, authorize, parsed, composed, template

    async def tokenize(self, request: Request) -> Response:
        """As llama-server's: ids, or ids with their pieces, which are bytes where those are no text."""
        asked: schema.TokenizeRequest = await self._parsed(request, schema.TokenizeRequest)
        tokenizer = self._worker.tokenizer
        try:
            ids = tokenizer.encode(
                asked.content,
                add_bos=None if asked.add_special else False,
                add_end=None if asked.add_special else False,
                parse_special=asked.parse_special,
            )
        except TokenizerError as e:
            raise BadRequest(str(e), "content") from e
        if not asked.with_pieces:
            return JSONResponse({"tokens": ids})
        return JSONResponse({"tokens": [{"id": i, "piece": _piece(tokenizer.token_bytes(i, special=True))} for i in ids]})

    async def detokenize(self, request: Request) -> Response:
        asked: schema.DetokenizeRequest = await self._parsed(request, schema.DetokenizeRequest)
        try:
            return JSONResponse({"content": self._worker.tokenizer.decode(asked.tokens, special=True)})
        except TokenizerError as e:
            raise BadRequest(str(e), "tokens") from e

    async def count(self, request: Request) -> Response:
        """How many tokens the prompt of a chat would have."""
        asked: schema.ChatRequest = await self._parsed(request, schema.ChatRequest)
        return JSONResponse({"object": "response.input_tokens", "input_tokens": len((await self._composed(asked)).ids)})

    async def apply_template(self, request: Request) -> Response:
        """The prompt that a chat would have."""
        asked: schema.ChatRequest = await self._parsed(request, schema.ChatRequest)
        return JSONResponse({"prompt": (await self._composed(asked)).text})

    async def props(self, request: Request) -> Response:
        self._authorize(request)
        worker, options = self._worker, Options.of(self._defaults)
        model = worker.model
        tokenizer = worker.tokenizer
        spelled = {
            name: "" if token is None else tokenizer.token_bytes(token, special=True).decode("utf-8", "replace")
            for name, token in (("bos_token", tokenizer.bos), ("eos_token", tokenizer.eos_id))
        }
        params = {name: getattr(options, name) for name in ("temperature", "top_k", "top_p", "min_p", "repeat_penalty")}
        params |= options.settings | {"samplers": options.samplers or SAMPLERS}
        body = {
            "default_generation_settings": {"n_ctx": worker.n_ctx, "params": params},
            "total_slots": getattr(worker, "parallel", 1),
            "model_alias": worker.model_name,
            "model_path": model.name,
            "modalities": {"vision": False, "audio": False},
            "chat_template": self._template or model.template or "",
            **spelled,
        }
        return JSONResponse(body)


def _piece(spelled: bytes) -> str | list[int]:
    try:
        return spelled.decode("utf-8")
    except UnicodeDecodeError:
        return list(spelled)
