"""/v1/embeddings and /v1/rerank: vectors and scores of texts, which the worker makes between pieces of text of others."""

from __future__ import annotations

import asyncio
import base64
import time
from collections.abc import Awaitable, Callable
from typing import Any

import numpy as np
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from vkback.api import LoadedModel
from vkback.api.vectors import Vectors, normalized, ranked, vectors
from vkback.models.texts import Pooling
from vkback.server import schema
from vkback.server.errors import BadRequest, ServerError, Unavailable
from vkback.server.queued import Called, Event, QueuedRequest
from vkback.server.worker import Worker


class Embeddings:
    """`parsed` gives the body of a request, authorized and checked; `require_model` refuses a wrong name. pooling: in the place of what the
    file says."""

    def __init__(
        self,
        worker: Worker,
        parsed: Callable[[Request, type[Any]], Awaitable[Any]],
        require_model: Callable[[str | None], None],
        request_s: float,
        pooling: Pooling | None,
    ) -> None:
        self._worker, self._parsed, self._require_model, self._request_s = worker, parsed, require_model, request_s
        self._pooling = pooling

    async def embeddings(self, request: Request) -> Response:
        """OpenAI's: a vector of length 1 for each text, as numbers or as the base64 of little-endian float32."""
        asked: schema.EmbeddingRequest = await self._parsed(request, schema.EmbeddingRequest)
        self._require_model(asked.model)
        texts, width = asked.texts(), self._worker.facts.embedding_width
        if asked.dimensions is not None and asked.dimensions > width:
            raise BadRequest(f"[server] dimensions: {asked.dimensions}; vectors of this model have {width} values", "dimensions")

        def embed(model: LoadedModel) -> tuple[Vectors, int]:
            ids = model.text_ids(texts)
            return np.stack(list(vectors(model.engine, ids, self._pooling, True))), sum(map(len, ids))

        rows, count = await self._made(request, embed)
        if asked.dimensions is not None:
            rows = normalized(rows[:, : asked.dimensions])
        as_text = asked.encoding_format == "base64"
        spelled = [base64.b64encode(row.astype("<f4").tobytes()).decode() if as_text else row.tolist() for row in rows]
        data = [{"object": "embedding", "index": i, "embedding": vector} for i, vector in enumerate(spelled)]
        return JSONResponse({"object": "list", "data": data, "model": self._worker.model_name, "usage": _usage(count)})

    async def of_content(self, request: Request) -> Response:
        """llama-server's: `content` is one text or several, and of each there is a list with its vector."""
        asked: schema.ContentEmbedding = await self._parsed(request, schema.ContentEmbedding)
        texts = asked.texts()

        def embed(model: LoadedModel) -> tuple[Vectors, int]:
            ids = model.text_ids(texts)
            return np.stack(list(vectors(model.engine, ids, self._pooling, asked.embd_normalize != -1))), sum(map(len, ids))

        rows, _ = await self._made(request, embed)
        return JSONResponse([{"index": i, "embedding": [row.tolist()]} for i, row in enumerate(rows)])

    async def rerank(self, request: Request) -> Response:
        """As Jina's and llama-server's: documents by how well they answer the query, the best first."""
        asked: schema.RerankRequest = await self._parsed(request, schema.RerankRequest)
        self._require_model(asked.model)
        documents = asked.plain()

        def rank(model: LoadedModel) -> tuple[Vectors, int]:
            pairs = [model.pair_ids(asked.query, text, i) for i, text in enumerate(documents)]
            return ranked(model.engine, pairs), sum(len(ids) for ids, _ in pairs)

        scores, count = await self._made(request, rank)
        best = np.argsort(-scores, kind="stable")[: asked.top_n or len(documents)]
        results: list[dict[str, Any]] = [{"index": int(i), "relevance_score": float(scores[i])} for i in best]
        if asked.return_documents:
            results = [result | {"document": {"text": documents[result["index"]]}} for result in results]
        return JSONResponse({"object": "list", "model": self._worker.model_name, "results": results, "usage": _usage(count)})

    async def _made(self, request: Request, make: Callable[[LoadedModel], tuple[Vectors, int]]) -> tuple[Vectors, int]:
        """What `make` gives in the thread of the worker, and the tokens it took. Raises the error that it ends with, Unavailable where it
        does not come in the time of the request."""
        loop = asyncio.get_running_loop()
        done: asyncio.Future[Event] = loop.create_future()

        def settle(event: Event) -> None:
            if not done.done():
                done.set_result(event)

        def put(event: Event) -> None:
            loop.call_soon_threadsafe(settle, event)

        client = request.client.host if request.client else ""
        queued = QueuedRequest("", False, {}, client, time.monotonic() + self._request_s, put, call=make)
        self._worker.submit(queued)
        try:
            found = await asyncio.wait_for(done, self._request_s)
        except TimeoutError:
            raise Unavailable("[server] the time of the request is over; ask for fewer texts at a time") from None
        finally:
            if not done.done() or done.cancelled():
                self._worker.cancel(queued)
        if isinstance(found, ServerError):
            raise found
        assert isinstance(found, Called)
        return found.vectors, found.tokens


def _usage(tokens: int) -> dict[str, int]:
    return {"prompt_tokens": tokens, "total_tokens": tokens}
