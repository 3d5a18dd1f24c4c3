"""Errors of the server, each with the HTTP status and the code that a client gets."""

from __future__ import annotations

from typing import ClassVar

from vkback.errors import VkbackError


class ServerError(VkbackError):
    """A request that is not answered. status: of HTTP; kind, code: `type` and `code` of OpenAI's error object."""

    status: ClassVar[int] = 500
    kind: ClassVar[str] = "server_error"
    code: ClassVar[str] = "internal_error"

    def __init__(self, message: str, param: str | None = None, retry_after_s: int | None = None) -> None:
        """param: the field of the request that it is about; retry_after_s: when to try again."""
        super().__init__(message)
        self.param = param
        self.retry_after_s = retry_after_s
        self.more: dict[str, int] = {}
        """Of the error's object, beside what all have."""


class BadRequest(ServerError):  # noqa: N818  the names of these conditions are HTTP's
    """The request is not what the endpoint takes."""

    status = 400
    kind = "invalid_request_error"
    code = "invalid_value"


class Unauthorized(ServerError):  # noqa: N818
    """No API key, or a wrong one."""

    status = 401
    kind = "authentication_error"
    code = "invalid_api_key"


class UnknownModel(BadRequest):
    """A model that this server does not have."""

    status = 404
    code = "model_not_found"


class NoEndpoint(BadRequest):
    """A path that nothing answers to."""

    status = 404
    code = "unknown_endpoint"


class WrongMethod(BadRequest):
    """Another method than the endpoint takes."""

    status = 405
    code = "method_not_allowed"


class ContextTooLong(BadRequest):
    """More tokens than the context has. The words are OpenAI's, since clients look for them, and
    some for the code in the words."""

    code = "context_length_exceeded"

    def __init__(self, tokens: int, n_ctx: int, chat: bool) -> None:
        what, field = ("messages", "messages") if chat else ("prompt", "prompt")
        super().__init__(
            f"[server] This model's maximum context length is {n_ctx} tokens. However, your {what} resulted in {tokens} tokens. "
            f"Please reduce the length of the {what}, or start the server with a larger --ctx ({self.code}).",
            field,
        )
        self.more = {"n_prompt_tokens": tokens, "n_ctx": n_ctx}


class WrongHost(BadRequest):
    """A Host header that this server does not answer to."""

    code = "invalid_host"


class BodyTimeout(BadRequest):
    """The body did not come in time."""

    status = 408
    code = "request_timeout"


class BodyTooLarge(BadRequest):
    """The body is above the limit."""

    status = 413
    code = "request_too_large"


class NotJson(BadRequest):
    """The content type is another one than JSON."""

    status = 415
    code = "unsupported_media_type"


class QueueFull(ServerError):  # noqa: N818
    """As many requests wait as may."""

    status = 429
    kind = "rate_limit_error"
    code = "queue_full"


class Unavailable(ServerError):  # noqa: N818
    """The server is ending, or the request waited for too long."""

    status = 503
    code = "unavailable"


class LostDevice(Unavailable):
    """The device stopped while the request ran; it is opened anew for the next one."""

    code = "device_lost"
