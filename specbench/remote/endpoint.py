"""An OpenAI-compatible endpoint: what it serves, and one streamed completion with its times. Knows HTTP, and no model.

Whatever a server does ends in an answer or in one line. Redirects are not followed, nothing is read without end, and what
it says of itself is shortened before it is shown.
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
SHOWN = 200  # characters of what a server says
KEY = "OPENAI_API_KEY"  # the environment variable that holds the key of a server that wants one


@dataclass
class Answer:
    """One completion.

    Attributes:
        ids: of its tokens, as the server says them; None: it does not. text: without special tokens.
        first_s: from the request, over a connection that is there, to the first token. decode_s: from there to the last.
        reason: why it ended, `stop` or `length`.
    """

    ids: list[int] | None = field(default_factory=list)
    text: str = ""
    first_s: float = 0.0
    decode_s: float = 0.0
    reason: str | None = None
    pieces: int = 0  # that held anything

    def add(self, choice: Mapping[str, Any], seconds: float) -> bool:
        """Take one event's choice in, so long after the request; did it hold a token?

        Raises:
            TypeError: it is no completion's.
        """
        text, ids, reason = choice.get("text") or "", choice.get("token_ids"), choice.get("finish_reason")
        if not isinstance(text, str) or not isinstance(reason, (str, type(None))):
            raise TypeError("text")
        if ids is not None and not (isinstance(ids, list) and all(type(i) is int and 0 <= i < 1 << 31 for i in ids)):
            raise TypeError("token_ids")
        self.reason = reason or self.reason
        if not text and not ids:
            return False
        self.ids = None if ids is None or self.ids is None else self.ids + ids
        self.text, self.pieces = self.text + text, self.pieces + 1
        if self.pieces == 1:
            self.first_s = seconds
        self.decode_s = seconds - self.first_s
        return True


class Endpoint:
    """A server at an address, as `http://127.0.0.1:8000` or with the path before `/completions`, else `/v1`.

    The key in the environment variable `KEY` goes to the server alone, and into nothing that is shown or kept.

    Args:
        patience_s: how long it may let one wait for a connection, for an answer, and from token to token.

    Raises:
        SpecBenchError: the address is none, or the key is nothing that a header can hold.
    """

    def __init__(self, url: str, patience_s: float):
        try:
            parts = urlsplit(url)
            known = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
        except ValueError:  # a port that is none
            known = False
        if not known or parts.username is not None or parts.query or parts.fragment:
            raise SpecBenchError(
                f"endpoint={url}: must be http://HOST:PORT or https://…, with nothing but a path behind it"
            )
        self.url, self.patience = url, patience_s
        self.host, self.port = str(parts.hostname), parts.port
        self.kind = HTTPSConnection if parts.scheme == "https" else HTTPConnection
        self.path = parts.path.rstrip("/") or "/v1"
        _key()

    def models(self) -> list[dict[str, Any]]:
        """The server's list of its models."""
        with self._asked("GET", "/models") as (response, _):
            data = response.read(MAX_LINE + 1)
            try:
                found = json.loads(data)["data"] if len(data) <= MAX_LINE else None
                if isinstance(found, list) and all(isinstance(model["id"], str) for model in found):
                    return found
            except (ValueError, TypeError, KeyError, RecursionError):
                pass
        raise self._error(f"{self.path}/models lists no models; is it an OpenAI-compatible server?")

    def complete(self, request: Mapping[str, Any]) -> Answer:
        """One completion. Raises `SpecBenchError` for a server that fails, breaks off, or says more than was asked."""
        answer = Answer()
        with self._asked("POST", "/completions", {**request, "stream": True}) as (response, begin):
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
            if seconds > answer.first_s + answer.decode_s + self.patience:
                raise self._error(f"no token for {self.patience:g} s; is it busy? drafter.patience_s= waits longer")
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
    def _asked(self, method: str, what: str, body: Mapping[str, Any] | None = None) -> Iterator[tuple[HTTPResponse, float]]:
        """The response to a request, and when it was sent; the connection ends with the block."""
        connection = self.kind(self.host, self.port, timeout=self.patience)
        try:
            connection.connect()
            begin = time.perf_counter()
            sent = None if body is None else json.dumps(body)
            key = {"Authorization": f"Bearer {token}"} if (token := _key()) else {}
            connection.request(method, self.path + what, sent, {"Content-Type": "application/json", **key})
            response = connection.getresponse()
            if response.status != 200:
                raise self._error(_refused(response, self.path + what))
            yield response, begin
        except TimeoutError as error:
            raise self._error(f"silent for {self.patience:g} s; is it busy? drafter.patience_s= waits longer") from error
        except OSError as error:
            raise self._error(f"{_short(error.strerror or str(error)).lower()}; is the server running?") from error
        except HTTPException as error:
            raise self._error(f"its response was cut off or is no HTTP ({type(error).__name__})") from error
        finally:
            connection.close()

    def _error(self, what: str) -> SpecBenchError:
        return SpecBenchError(f"endpoint={self.url}: {what}")


def _key() -> str:
    """The user's key, or an empty text. Raises `SpecBenchError`, which does not show the key, if no header can hold it."""
    key = os.environ.get(KEY, "").strip()
    if not (key.isascii() and key.isprintable()) or " " in key:
        raise SpecBenchError(f"{KEY}: must be one word of plain characters; set it to the server's key, or unset it")
    return key


def _refused(response: HTTPResponse, path: str) -> str:
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
    """The message in an error's body, wherever servers put it."""
    for key in ("error", "message", "detail"):
        if isinstance(body, dict) and body.get(key):
            body = body[key]
    return _short(body if isinstance(body, str) else json.dumps(body))


def _short(text: str) -> str:
    """A server's message on one line, cut off, without the key if it repeats that."""
    key = _key()
    return shorten(one_line(ValueError(text.replace(key, "…") if key else text)), SHOWN)
