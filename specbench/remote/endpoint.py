"""An OpenAI-compatible endpoint: its models, and streamed completions with their times. Knows HTTP, and no model.

Whatever the server does ends in an answer or in one line. Redirects are not followed, responses are read up to a limit,
and texts of the server are shortened before they are shown.
"""

import json
import os
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.client import HTTPConnection, HTTPException, HTTPResponse, HTTPSConnection
from typing import Any
from urllib.parse import urlsplit

from specbench.common.errors import SpecBenchError, one_line, shorten

PIECE, MAX_LINE, MAX_BYTES = 1 << 16, 1 << 20, 1 << 26  # bytes: of one read, of one line of a stream, of a whole response
MAX_SHOWN = 200  # characters of a server's message
KEY = "OPENAI_API_KEY"  # the environment variable with the server's key, if it needs one


@dataclass
class Answer:
    """One completion.

    Attributes:
        ids: of its tokens; None: the server does not send them. text: without special tokens.
        first_s: from the request, over an open connection, to the first token. decode_s: from there to the last token.
        reason: why it ended, `stop` or `length`. pieces: events with a token.
    """

    ids: list[int] | None = field(default_factory=list)
    text: str = ""
    first_s: float = 0.0
    decode_s: float = 0.0
    reason: str | None = None
    pieces: int = 0

    def add(self, choice: Mapping[str, Any], seconds: float) -> None:
        """Add the choice of an event that came `seconds` after the request. Raises `TypeError` if it is no completion."""
        text, ids, reason = choice.get("text") or "", choice.get("token_ids"), choice.get("finish_reason")
        if not isinstance(text, str) or not isinstance(reason, (str, type(None))):
            raise TypeError("text")
        if ids is not None and not (isinstance(ids, list) and all(type(i) is int and 0 <= i < 1 << 31 for i in ids)):
            raise TypeError("token_ids")
        self.reason = reason or self.reason
        if not text and not ids:
            return
        self.ids = None if ids is None or self.ids is None else self.ids + ids
        self.text, self.pieces = self.text + text, self.pieces + 1
        if self.pieces == 1:
            self.first_s = seconds
        self.decode_s = seconds - self.first_s


class Endpoint:
    """A server at a URL such as `http://127.0.0.1:8000`; its path is what precedes `/completions`, by default `/v1`.

    The key in the environment variable `KEY` is sent to the server only, and never shown or stored.

    timeout_s: of connecting, of an answer, and from token to token. Raises `SpecBenchError` for an invalid URL or key.
    """

    def __init__(self, url: str, timeout_s: float):
        try:
            parts = urlsplit(url)
            valid = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
        except ValueError:  # not a port
            valid = False
        if not valid or parts.username is not None or parts.query or parts.fragment:
            raise SpecBenchError(
                f"endpoint={url}: must be http://HOST:PORT or https://…, with nothing but a path behind it"
            )
        self.url, self.timeout_s = url, timeout_s
        self.host, self.port = str(parts.hostname), parts.port
        self.kind = HTTPSConnection if parts.scheme == "https" else HTTPConnection
        self.path = parts.path.rstrip("/") or "/v1"
        _key()

    def models(self) -> list[dict[str, Any]]:
        """The server's list of its models."""
        with self._request("GET", "/models") as (response, _):
            data = response.read(MAX_LINE + 1)
            try:
                models = json.loads(data)["data"] if len(data) <= MAX_LINE else None
                if isinstance(models, list) and all(isinstance(model["id"], str) for model in models):
                    return models
            except (ValueError, TypeError, KeyError, RecursionError):
                pass
        raise self._error(f"{self.path}/models lists no models; is it an OpenAI-compatible server?")

    def complete(self, request: Mapping[str, Any]) -> Answer:
        """One completion. Raises `SpecBenchError` if the server fails, breaks off, or sends more tokens than requested."""
        answer = Answer()
        with self._request("POST", "/completions", {**request, "stream": True}) as (response, begin):
            for seconds, event in self._events(response, begin, answer):
                choices = event.get("choices")
                if "error" in event or event.get("object") == "error":
                    raise self._error(f"it failed: {_message(event)}")
                try:
                    for choice in choices or ():
                        answer.add(choice, seconds)
                except (TypeError, AttributeError) as error:
                    raise self._error(f"its stream holds what is no completion: {_short(json.dumps(event))}") from error
                if max(answer.pieces, len(answer.ids or ())) > request["max_tokens"]:
                    raise self._error(f"it sends more than the {request['max_tokens']} tokens that were asked for")
        if not answer.pieces:
            raise self._error("it answered without a token")
        if answer.reason not in ("stop", "length"):
            raise self._error(f"its answer ended with finish_reason={_short(str(answer.reason))}")
        return answer

    def _events(self, response: HTTPResponse, begin: float, answer: Answer) -> Iterator[tuple[float, dict[str, Any]]]:
        """The events of a stream, each with the seconds since the request."""
        rest, total = b"", 0
        while part := response.read1(PIECE):
            seconds = time.perf_counter() - begin
            *lines, rest = (rest + part).split(b"\n")
            total += len(part)
            if total > MAX_BYTES or len(rest) > MAX_LINE:
                raise self._error(f"its stream has no end: {total:,} bytes")
            for line in lines:
                if line.startswith(b"data:"):
                    data = line.removeprefix(b"data:").strip()
                    if data == b"[DONE]":
                        return
                    yield seconds, self._event(data)
            if seconds > answer.first_s + answer.decode_s + self.timeout_s:
                raise self._error(f"no token for {self.timeout_s:g} s; is it busy? drafter.timeout_s= waits longer")
        raise self._error("its stream was cut off")

    def _event(self, data: bytes) -> dict[str, Any]:
        try:
            event = json.loads(data)
        except (ValueError, RecursionError):
            event = None
        if not isinstance(event, dict):
            raise self._error(f"its stream holds no JSON object: {_short(data.decode(errors='replace'))}")
        return event

    @contextmanager
    def _request(
        self, method: str, route: str, body: Mapping[str, Any] | None = None
    ) -> Iterator[tuple[HTTPResponse, float]]:
        """The response to a request, and when it was sent; the connection is closed with the block."""
        connection, path = self.kind(self.host, self.port, timeout=self.timeout_s), self.path + route
        try:
            connection.connect()
            begin = time.perf_counter()
            key = {"Authorization": f"Bearer {token}"} if (token := _key()) else {}
            headers = {"Content-Type": "application/json", **key}
            connection.request(method, path, None if body is None else json.dumps(body), headers)
            response = connection.getresponse()
            if response.status != 200:
                raise self._error(_status_message(response, path))
            yield response, begin
        except TimeoutError as error:
            raise self._error(f"silent for {self.timeout_s:g} s; is it busy? drafter.timeout_s= waits longer") from error
        except OSError as error:
            raise self._error(f"{_short(error.strerror or str(error)).lower()}; is the server running?") from error
        except HTTPException as error:
            raise self._error(f"its response was cut off or is no HTTP ({type(error).__name__})") from error
        finally:
            connection.close()

    def _error(self, message: str) -> SpecBenchError:
        return SpecBenchError(f"endpoint={self.url}: {message}")


def _key() -> str:
    """The user's key, or "". Raises `SpecBenchError`, without showing the key, if no header can hold it."""
    key = os.environ.get(KEY, "").strip()
    if not (key.isascii() and key.isprintable()) or " " in key:
        raise SpecBenchError(f"{KEY}: must be one word of plain characters; set it to the server's key, or unset it")
    return key


def _status_message(response: HTTPResponse, path: str) -> str:
    """The message on a status other than 200."""
    if response.status in (401, 403):
        hint = f"check the key in {KEY}" if _key() else f"set {KEY} to its key"
        return f"{path} answers {response.status}, access refused; {hint}"
    if 300 <= response.status < 400:
        return f"it redirects to {_short(str(response.headers.get('Location')))}; give that address if you trust it"
    try:
        message = _message(json.loads(response.read(PIECE)))
    except (ValueError, RecursionError):
        message = response.reason
    hint = "; does its address end before /completions?" if response.status == 404 else ""
    return f"{path} answers {response.status}: {_short(message)}{hint}"


def _message(body: Any) -> str:
    """The message in an error's body, at any of the keys that servers use."""
    for key in ("error", "message", "detail"):
        if isinstance(body, dict) and body.get(key):
            body = body[key]
    return _short(body if isinstance(body, str) else json.dumps(body))


def _short(text: str) -> str:
    """A server's message on one short line, without the key if it repeats that."""
    key = _key()
    return shorten(one_line(ValueError(text.replace(key, "…") if key else text)), MAX_SHOWN)
