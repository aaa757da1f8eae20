"""The server that holds the target: several clients, each with a cache of its own, in one thread, one pass at a time.

A bad message is answered with one line to its sender; other clients are not affected. Messages that need no pass are
answered first. A pass serves all clients that wait for one of about the same width, and whose turn it is goes by the
seconds that they have used. Knows no drafter.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import zmq

from specbench.common.errors import SpecBenchError, one_line
from specbench.common.timing import Clock
from specbench.engine.interface import DraftTree, TargetStates
from specbench.engine.target import Target
from specbench.engine.tensors import dtype_name
from specbench.remote import protocol
from specbench.remote.sessions import Session, Sessions
from specbench.remote.transport import server_socket

POLL_MS = 500  # between checks for clients that are gone
ALIVE = protocol.encode({"kind": "alive"})  # sent to find clients that are gone
BLOCKED_MS = 5  # between attempts to send to clients that do not receive


@dataclass
class Client:
    """A client's state on the server.

    Attributes:
        session: its generation on the target.
        number: of its last request. streaming: are the answers to that one a stream of plain decoding?
        unsent: an answer, while the client has not received the one before.
        request: the last one, while its pass has not run; a newer one replaces it, so that a client queues one at most.
        blocked: had its connection no room for the last answer? Until it takes one, its requests do not change `seen`.
        seen: time of the last message in either direction, on the monotonic clock.
        used: seconds of passes, see `Server._turn`.
    """

    session: Session
    number: int = 0
    streaming: bool = False
    unsent: bytes | None = None
    blocked: bool = False
    request: protocol.Begin | protocol.Pass | None = None
    seen: float = field(default_factory=time.monotonic)
    used: float = 0.0

    @property
    def has_work(self) -> bool:
        return self.request is not None or (self.streaming and self.unsent is None)

    @property
    def nodes(self) -> int | None:
        """Of the tree that it waits for; None: it waits for a prompt."""
        if self.request is None:
            return 1
        return len(self.request["tokens"]) if self.request["kind"] == "pass" else None

    def take(self) -> protocol.Begin | protocol.Pass | None:
        """The last request, which is waited for no longer."""
        request, self.request = self.request, None
        return request


class Server:
    """Runs a target for clients.

    Args:
        address: tcp://host:port; port 0 takes a free one.
        limits: of what a client may request, see `protocol.Limits`.
        idle_s: a client that sends nothing for so long, or receives nothing that it asks for, is dropped.
        condensers: drafters bound to the target that condense states before they are sent, see `Drafter.compress_states`.

    Attributes:
        address: with the actual port.
        clients: by ZeroMQ's routing id of their connection.
    """

    def __init__(
        self,
        target: Target,
        address: str,
        limits: protocol.Limits,
        idle_s: float = 600.0,
        condensers: Sequence[Any] = (),
    ):
        self.limits, self.idle_s = limits, idle_s
        self.sessions = Sessions(target, limits, {c.taps.condensed: c for c in condensers})
        self.fingerprint, self.clock = target.fingerprint(), Clock(target.device)
        self.clients: dict[bytes, Client] = {}
        self.socket = server_socket(address, limits["message"])
        self.address = self.socket.get_string(zmq.LAST_ENDPOINT)
        self.stopping = False
        self.served = 0.0  # `used` of the client that was served last

    def run(self, until: Callable[[], bool] = lambda: False) -> None:
        """Serve until `until()` or `stopping`; then close the socket."""
        checked = time.monotonic()
        try:
            while not (self.stopping or until()):
                self._receive()
                for slow, client in list(self.clients.items()):
                    if client.unsent is not None:
                        self._send(slow, client.unsent)
                self._work(self._turn())
                if time.monotonic() - checked > POLL_MS / 1000:
                    self._drop_gone()
                    checked = time.monotonic()
        finally:
            self.clients.clear()
            self.socket.close()

    def _receive(self) -> None:
        """Receive what has come, about one message of each client; wait for a message if there is nothing to do."""
        clients = list(self.clients.values())
        waiting = any(client.unsent is not None for client in clients)
        timeout = 0 if any(client.has_work for client in clients) else BLOCKED_MS if waiting else POLL_MS
        for _ in range(self.limits["clients"]):
            if not self.socket.poll(timeout):
                break
            self._answer()
            timeout = 0

    def _turn(self) -> list[bytes]:
        """The clients whose requests run next, in one pass: first the one that has used the fewest seconds (fair queueing).

        A client that was idle counts as if it had used what the last served one had, so that it neither waits for all
        others nor may make up for its idle time.
        """
        busy = {peer: client for peer, client in self.clients.items() if client.has_work}
        for client in busy.values():
            client.used = max(client.used, self.served)
        first = min(busy.values(), key=lambda client: client.used, default=None)
        if first is None:
            return []
        self.served = first.used
        return [peer for peer, client in busy.items() if client is first or self._share_a_pass(first, client)]

    def _share_a_pass(self, one: Client, other: Client) -> bool:
        if one.nodes is None or other.nodes is None:
            return False
        return self.sessions.share_a_pass(one.session, one.nodes, other.session, other.nodes)

    def _answer(self) -> None:
        """Receive one message; answer it, or keep it until its pass runs."""
        peer, *frames = self.socket.recv_multipart()
        number = 0
        try:
            if not peer.startswith(b"\0"):  # a routing id that the client chose might be another client's
                raise SpecBenchError("a connection with a name of its own choice; leave ZMQ_ROUTING_ID unset")
            if len(frames) != 1:
                raise SpecBenchError(f"a message of {len(frames)} frames, where one was expected")
            request = protocol.decode(frames[0], protocol.REQUEST)
            number = request["n"]
            if request["kind"] == "hello":
                self._send(peer, protocol.encode(self._welcome(peer, request) | {"n": number}))
            elif (client := self.clients.get(peer)) is None:
                raise SpecBenchError("send hello first: this server does not know the client, or has dropped it as idle")
            elif request["kind"] == "end":
                self._drop(peer)
            else:
                if not client.blocked:
                    client.seen = time.monotonic()
                client.number, client.request, client.unsent, client.streaming = number, request, None, False
        except Exception as error:
            self._refuse(peer, number, error)

    def _work(self, peers: list[bytes]) -> None:
        """Run a client's prompt, or the trees of several in one pass."""
        with torch.inference_mode():
            if len(peers) == 1 and self.clients[peers[0]].nodes is None:
                self._reply(peers[0], self._begin)
                return
            waiting: list[tuple[bytes, DraftTree]] = []
            for peer in peers:
                self._reply(peer, partial(self._await_pass, waiting, peer))
            if waiting:
                self._pass(waiting)

    def _reply(self, peer: bytes, work: Callable[[Client], dict[str, Any] | None]) -> None:
        """Answer a client's last request with what some work gives, or with its error; with nothing if that is None."""
        client = self.clients[peer]
        try:
            if (answer := work(client)) is not None:
                self._send(peer, protocol.encode({"kind": "answer", "n": client.number, **answer}))
        except Exception as error:
            self._refuse(peer, client.number, error)

    def _begin(self, client: Client) -> dict[str, Any]:
        begin = self.clock()
        request = client.take()
        assert request is not None and request["kind"] == "begin"
        answer = self.sessions.begin(client.session, request)
        client.streaming = request["taps"]["free_running"] and "token" in answer
        client.used += (seconds := self.clock() - begin)
        return {**answer, "seconds": seconds}

    def _await_pass(self, waiting: list[tuple[bytes, DraftTree]], peer: bytes, client: Client) -> None:
        """Check a client's tree and put it among those of the next pass."""
        request = client.take()
        assert request is None or request["kind"] == "pass"
        if request is None and client.session.over:
            client.streaming = False
        else:
            waiting.append((peer, self.sessions.tree(client.session, request)))

    def _pass(self, waiting: list[tuple[bytes, DraftTree]]) -> None:
        """One pass over trees of several clients. If it fails, each has one of its own, and whose fails, fails."""
        begin = self.clock()
        try:
            states = self.sessions.forward([self.clients[peer].session for peer, _ in waiting], [t for _, t in waiting])
        except Exception as error:
            if len(waiting) == 1:
                self._refuse(waiting[0][0], self.clients[waiting[0][0]].number, error)
                return
            for one in waiting:
                self._pass([one])
            return
        seconds = self.clock() - begin
        for (peer, tree), own in zip(waiting, states, strict=True):
            self.clients[peer].used += seconds / len(waiting)
            self._reply(peer, partial(self._accept, tree, own, seconds))

    def _accept(self, tree: DraftTree, states: TargetStates, seconds: float, client: Client) -> dict[str, Any]:
        """seconds: of the pass."""
        begin = self.clock()
        answer = self.sessions.accept(client.session, tree, states)
        client.used += (own := self.clock() - begin)
        return {**answer, "seconds": seconds + own}

    def _refuse(self, peer: bytes, number: int, error: Exception) -> None:
        """Answer with an error. A fault of the server ends the client's session; the server goes on for other clients."""
        message = one_line(error)
        if not isinstance(error, SpecBenchError):
            self._drop(peer)
            message = f"the server failed at this request: {message}"
        elif (client := self.clients.get(peer)) is not None:
            client.streaming = False
        full = {"full": True} if isinstance(error, protocol.ServerFull) else {}
        self._send(peer, protocol.encode({"kind": "error", "message": message[:1000], "n": number, **full}))

    def _welcome(self, peer: bytes, request: protocol.Hello) -> dict[str, Any]:
        if request["version"] != protocol.VERSION:
            raise SpecBenchError(
                f"this server speaks version {protocol.VERSION}, you speak {request['version']}; install the same SpecBench"
            )
        if peer not in self.clients and len(self.clients) >= self.limits["clients"]:
            self._drop_gone()
        if peer not in self.clients and len(self.clients) >= self.limits["clients"]:
            raise protocol.ServerFull(f"this server has its {self.limits['clients']} clients already; try again later")
        if peer not in self.clients:
            self.clients[peer] = Client(self.sessions.new())
        description = {"version": protocol.VERSION, "fingerprint": self.fingerprint, "limits": self.limits}
        description["dtype"] = dtype_name(self.sessions.target.dtype)
        return {"kind": "welcome", **description, "condensers": list(self.sessions.condensers)}

    # Clients ------------------------------------------------------------------------------------------------------------

    def _send(self, peer: bytes, reply: bytes) -> None:
        """Send an answer now, or as soon as the client has received those before; its next request makes it void."""
        client = self.clients.get(peer)
        try:
            self.socket.send_multipart([peer, reply], zmq.NOBLOCK)
            if client is not None:
                client.unsent, client.blocked, client.seen = None, False, time.monotonic()
        except zmq.Again:
            if client is not None:
                client.unsent, client.blocked = reply, True
        except zmq.ZMQError:  # the client is gone
            self._drop(peer)

    def _drop_gone(self) -> None:
        """Drop clients that are gone or idle."""
        now = time.monotonic()
        for peer, client in list(self.clients.items()):
            if now - client.seen > self.idle_s:
                self._drop(peer)
                continue
            try:
                self.socket.send_multipart([peer, ALIVE], zmq.NOBLOCK)
            except zmq.Again:  # it does not receive at the moment
                continue
            except zmq.ZMQError:
                self._drop(peer)

    def _drop(self, peer: bytes) -> None:
        """End a client's generation and free its cache."""
        if (client := self.clients.pop(peer, None)) is not None:
            self.sessions.end(client.session)
