"""Sends and receives frames over the agent's stream (`trainium_contract.wire.stream`)."""

from __future__ import annotations

import asyncio
import gzip
import zlib
from typing import TYPE_CHECKING

from pydantic import BaseModel, ValidationError

from trainium_contract.wire.messages import ErrorResponse, RegisterRequest, RegisterResponse
from trainium_contract.wire.stream import HEAD_BYTES, FrameKind, frame, head_of

if TYPE_CHECKING:
    import ssl

_SWITCHING = 101
_LONGEST_HEAD = 16 * 1024
_LONGEST_REFUSAL = 64 * 1024
_LONGEST_FRAME = 64 * 1024 * 1024
"""A membership of 100,000 workers."""
_TLS_SHUTDOWN_SECONDS = 2.0


class StreamRefusedError(Exception):
    """The coordinator answered the request with something other than a stream."""

    def __init__(self, status: int, body: str) -> None:
        super().__init__(f"a stream was answered with {status}")
        self.status = status
        self.body = body


class StreamEndedError(ConnectionError):
    """The coordinator ended the stream, or the connection broke; the text is one sentence."""


class Stream:
    """One open stream; the caller closes it."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer

    @classmethod
    async def open(cls, where: tuple[str, int], context: ssl.SSLContext, name: str, request: str) -> Stream:
        """Connect and send the request. Raises StreamRefusedError, OSError, ValueError."""
        reader, writer = await asyncio.open_connection(
            *where, ssl=context, server_hostname=name, limit=_LONGEST_HEAD, ssl_shutdown_timeout=_TLS_SHUTDOWN_SECONDS
        )
        stream = cls(reader, writer)
        try:
            writer.write(request.encode())
            await stream._upgraded()
        except asyncio.IncompleteReadError as error:
            stream.close()
            raise ConnectionResetError("the connection was closed") from error
        except BaseException:
            stream.close()
            raise
        return stream

    async def _upgraded(self) -> None:
        try:
            head = await self._reader.readuntil(b"\r\n\r\n")
        except asyncio.LimitOverrunError as error:
            raise ValueError("the answer is no HTTP") from error
        lines = head.decode("latin-1").split("\r\n")
        status = int(lines[0].split(" ")[1]) if lines[0].count(" ") else 0
        if status == _SWITCHING:
            return
        fields = {key.strip().lower(): value.strip() for key, _, value in (line.partition(":") for line in lines[1:])}
        length = min(int(fields.get("content-length", "0")), _LONGEST_REFUSAL)
        body = await self._reader.readexactly(length) if length else b""
        raise StreamRefusedError(status, body.decode(errors="replace"))

    async def register(self, request: RegisterRequest, seconds: float) -> RegisterResponse:
        """Register this agent. Raises StreamEndedError, after which the stream is closed."""
        try:
            async with asyncio.timeout(seconds):
                return await self._welcome(request)
        except (TimeoutError, ValidationError) as error:
            self.close()
            raise StreamEndedError(f"the registration was not answered ({type(error).__name__})") from error
        except BaseException:
            self.close()
            raise

    async def _welcome(self, request: RegisterRequest) -> RegisterResponse:
        await self.send(FrameKind.REGISTER, request)
        while True:
            kind, payload = await self.receive()
            if kind == FrameKind.REGISTERED:
                return RegisterResponse.model_validate_json(payload)
            if kind == FrameKind.ERROR:
                raise StreamEndedError(format_refusal(parse_refusal(payload)))

    async def send(self, kind: FrameKind, message: BaseModel | bytes) -> None:
        """Send one frame. Raises StreamEndedError."""
        payload = (
            message
            if isinstance(message, bytes)
            else message.model_dump_json(by_alias=True, exclude_none=True).encode()
        )
        try:
            self._writer.write(frame(kind, payload))
            await self._writer.drain()
        except OSError as error:
            raise StreamEndedError(f"the connection broke ({error or type(error).__name__})") from error

    async def receive(self) -> tuple[int, bytes]:
        """Return the next frame; a packed membership is unpacked. Raises StreamEndedError."""
        try:
            kind, length = head_of(await self._reader.readexactly(HEAD_BYTES))
            if length > _LONGEST_FRAME:
                raise StreamEndedError(f"the coordinator sent a frame of {length} bytes")
            payload = await self._reader.readexactly(length)
            if kind == FrameKind.PACKED_MEMBERSHIP:
                return FrameKind.MEMBERSHIP, gzip.decompress(payload)
        except asyncio.IncompleteReadError as error:
            raise StreamEndedError("the coordinator closed the stream") from error
        except (OSError, EOFError, zlib.error) as error:
            raise StreamEndedError(f"the connection broke ({error or type(error).__name__})") from error
        return kind, payload

    def close(self) -> None:
        """Close the connection at once."""
        self._writer.transport.abort()


def parse_refusal(payload: bytes) -> ErrorResponse:
    """Parse a refusal. Raises StreamEndedError when it is malformed."""
    try:
        return ErrorResponse.model_validate_json(payload)
    except ValidationError as error:
        raise StreamEndedError("the coordinator refused with something that is not understood") from error


def format_refusal(refusal: ErrorResponse) -> str:
    """Return a refusal as the end of a sentence."""
    return f"the coordinator answered {refusal.status}: {refusal.error}"
