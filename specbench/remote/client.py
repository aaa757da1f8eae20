"""A client's connection to a server: requests with answers within a deadline, and their bytes by kind."""

import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import zmq

from specbench.common.errors import SpecBenchError
from specbench.remote import protocol
from specbench.remote.transport import TOKEN, client_socket

NOTICE_S = 4.0  # of waiting before a line says so


class LinkLost(SpecBenchError):
    """The server does not answer, or the connection broke."""


@dataclass
class Traffic:
    """What one generation sent and received.

    Attributes:
        sent, received: bytes of messages by kind. round_trips: answered requests. resumed: successful reconnections.
        waited_s: from requests to their answers; server_s: the part of it in passes.
        prompt_bytes, prompt_s: the prompt's part of `sent` and `received`, and of `server_s`.
    """

    sent: dict[str, int] = field(default_factory=dict)
    received: dict[str, int] = field(default_factory=dict)
    round_trips: int = 0
    waited_s: float = 0.0
    server_s: float = 0.0
    resumed: int = 0
    prompt_bytes: int = 0
    prompt_s: float = 0.0


def _add(total: dict[str, int], sizes: Mapping[str, int]) -> None:
    for kind, size in sizes.items():
        total[kind] = total.get(kind, 0) + size


class Connection:
    """One client's connection to a server.

    Attributes:
        address: tcp://host:port. timeout_s: of an answer. max_bytes: of an answer.
        welcome: the server's description of itself. traffic: of the current generation.
    """

    def __init__(self, address: str, timeout_s: float, max_bytes: int):
        self.address, self.timeout_s, self.max_bytes = address, timeout_s, max_bytes
        self.socket: zmq.Socket[bytes] | None = None
        self.traffic, self.number = Traffic(), 0

    def open(self) -> None:
        """Connect, or reconnect. Raises `SpecBenchError` for a server of another version, `LinkLost` if none answers."""
        self.close()
        self.socket = client_socket(self.address, self.max_bytes)
        self.watch = self.socket.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        try:
            self.welcome: protocol.Welcome = self.request({"kind": "hello", "version": protocol.VERSION})
        except LinkLost as error:
            hint = f"is specbench.serve running there, with the same {TOKEN}?"
            raise LinkLost(f"no answer from {self.address}: {hint}") from error
        if self.welcome["version"] != protocol.VERSION:
            raise SpecBenchError(f"{self.address} speaks version {self.welcome['version']}; install the same SpecBench")

    def close(self) -> None:
        if self.socket is not None:
            self.socket.disable_monitor()
            self.watch.close()
            self.socket.close()
            self.socket = None

    def send(self, message: Mapping[str, Any]) -> None:
        """Send a message that has no answer."""
        self.number += 1
        if self.socket is not None:
            self.socket.send(protocol.encode({**message, "n": self.number}))

    def request(self, message: Mapping[str, Any]) -> Any:
        """The answer to a request. Raises `SpecBenchError` if the server refuses it, `LinkLost` if no answer comes."""
        self.number += 1
        data, sizes = protocol.encode_counted({**message, "n": self.number})
        if message["kind"] != "hello" and len(data) > (limit := self.welcome["limits"]["message"]):
            raise SpecBenchError(
                f"a message of {len(data)} bytes, but the server takes {limit}; set a larger megabytes= there"
            )
        begin = time.perf_counter()
        self._connected().send(data)
        answer = self.receive(begin)
        self.traffic.round_trips += 1
        _add(self.traffic.sent, sizes)
        return answer

    def receive(self, since: float | None = None) -> Any:
        """The next answer to the last request; `since` begins its timeout, by default now. Raises as `request` does."""
        begin = time.perf_counter() if since is None else since
        answer, sizes = self._answer(begin + self.timeout_s)
        self.traffic.waited_s += time.perf_counter() - begin
        if answer["kind"] == "error":
            self.close()  # after a fault of its own the server does not know this client any more
            raise (protocol.ServerFull if answer.get("full") else SpecBenchError)(
                f"{self.address} says: {answer['message']}"
            )
        _add(self.traffic.received, sizes)
        self.traffic.server_s += answer.get("seconds", 0.0)
        return answer

    def _connected(self) -> "zmq.Socket[bytes]":
        if self.socket is None:
            raise LinkLost(f"the link to {self.address} is broken")
        return self.socket

    def _answer(self, deadline: float) -> tuple[Any, dict[str, int]]:
        """The answer to the last request, and its bytes by kind."""
        socket = self._connected()
        poller = zmq.Poller()
        poller.register(socket, zmq.POLLIN)
        poller.register(self.watch, zmq.POLLIN)
        notice = time.perf_counter() + NOTICE_S
        while (left := deadline - time.perf_counter()) > 0:
            ready = dict(poller.poll(int(1000 * min(left, NOTICE_S)) + 1))
            if not ready and time.perf_counter() > notice:
                notice = deadline
                print(f"waiting for {self.address}, {left:.0f} s at most", file=sys.stderr, flush=True)
            if socket in ready:
                answer, sizes = protocol.decode_counted(socket.recv(), protocol.REPLY)
                if answer["kind"] != "alive" and answer["n"] == self.number:  # else of an abandoned request
                    return answer, sizes
            elif self.watch in ready:
                self.close()
                raise LinkLost(f"the link to {self.address} broke")
        self.close()
        raise LinkLost(f"no answer from {self.address} for {self.timeout_s:.0f} s")
