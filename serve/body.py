"""Reading a request's body: not more than the server takes, and not for longer."""

import asyncio

from fastapi import Request

from sparda_jax.serve.access import Access
from sparda_jax.serve.errors import ApiError


async def read_body(request: Request, access: Access) -> bytes:
    """The whole body.

    Raises:
        ApiError: 413 for a body beyond the limit, before any of it is read where its length is told; 408 for one that
            takes too long.
        ClientDisconnect: the client went away.
    """
    limit = access.max_body_mib << 20
    told = request.headers.get("content-length", "")
    if told.isdecimal() and (len(told) > 18 or int(told) > limit):  # Python reads no number of many digits
        raise _too_large(access)
    body = bytearray()
    try:
        async with asyncio.timeout(access.upload_seconds):
            async for chunk in request.stream():
                body += chunk
                if len(body) > limit:
                    raise _too_large(access)
    except TimeoutError as error:
        message = f"the request body did not arrive within {access.upload_seconds:g} s (--upload-seconds)"
        raise ApiError(408, message, code="upload_timeout") from error
    return bytes(body)


def _too_large(access: Access) -> ApiError:
    message = f"the request body is larger than {access.max_body_mib} MiB, the most that is taken (--max-body-mib)"
    return ApiError(413, message, code="body_too_large")
