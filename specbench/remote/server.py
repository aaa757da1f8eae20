"""The server that holds the target: several clients, each with a cache of its own, in one thread, one pass at a time.

A bad message is answered with one line to its sender; other clients are not affected. Messages that need no pass are
answered first; passes are shared fairly, by the seconds that clients have used. Knows no drafter.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
import zmq

from specbench.common.errors import SpecBenchError, one_line
from specbench.engine.cache import KVCache
from specbench.engine.interface import DraftTree, Taps, TargetStates
from specbench.engine.target import Target
from specbench.engine.tree import root_only
from specbench.engine.verify import LocalVerifier
from specbench.remote import protocol, requests
from specbench.remote.transport import server_socket

POLL_MS = 500  # between checks for clients that are gone
ALIVE = protocol.encode({"kind": "alive"})  # sent to find clients that are gone
BLOCKED_MS = 5  # between attempts to send to clients that do not receive


@dataclass
class Client:
    """A client's state on the server.

    Attributes:
        int8_states: are its states sent as int8?
        streamed: number of the request whose answers are a stream of plain decoding; None: the client sends trees.
        root: the last token of such a stream. unsent: an answer, while the client has not received the one before.
        request: the last one, while its pass has not run; a newer one replaces it, so that a client queues one at most.
        seen: time of the last message, on the monotonic clock. used: seconds of passes, see `Server._next`.
    """

    cache: KVCache
    taps: Taps = field(default_factory=Taps)
    verifier: LocalVerifier | None = None
    int8_states: bool = False
    streamed: int | None = None
    unsent: bytes | None = None
    root: int = 0
    request: protocol.Begin | protocol.Pass | None = None
    seen: float = field(default_factory=time.monotonic)
    used: float = 0.0

    @property
    def has_work(self) -> bool:
        return self.request is not None or (self.streamed is not None and self.unsent is None)


class Server:
    """Runs a target for clients.

    Args:
        address: tcp://host:port; port 0 takes a free one.
        limits: of what a client may request, see `protocol.Limits`.
        idle_s: a client without a message for so long is dropped.
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
        self.target, self.limits, self.idle_s = target, limits, idle_s
        self.condensers: dict[str, Any] = {c.taps.condensed: c for c in condensers}
        self.fingerprint = target.fingerprint()
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
                if (peer := self._next()) is not None:
                    self._work(peer, self.clients[peer])
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

    def _next(self) -> bytes | None:
        """The client whose pass runs next: the one that has used the fewest seconds (start-time fair queueing).

        A client that was idle counts as if it had used what the last served one had, so that it neither waits for all
        others nor may make up for its idle time.
        """
        busy = {peer: client for peer, client in self.clients.items() if client.has_work}
        for client in busy.values():
            client.used = max(client.used, self.served)
        peer = min(busy, key=lambda peer: busy[peer].used, default=None)
        if peer is not None:
            self.served = busy[peer].used
        return peer

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
                client.seen, client.unsent, client.streamed, client.request = time.monotonic(), None, None, request
        except Exception as error:
            self._refuse(peer, number, error)

    def _work(self, peer: bytes, client: Client) -> None:
        """Run a client's request, or the next token of its stream, and send the answer."""
        request, number, client.request = client.request, client.streamed or 0, None
        try:
            if request is None:
                if client.root in self.target.stop_ids or client.cache.length >= client.cache.capacity:
                    client.streamed = None
                    return
                reply = self._timed(client, self._verified, root_only(client.root, self.target.device))
            else:
                number = request["n"]
                reply = self._timed(client, self._begin if request["kind"] == "begin" else self._pass, request)
            self._send(peer, protocol.encode(reply | {"n": number}))
        except Exception as error:
            self._refuse(peer, number, error)

    def _timed(self, client: Client, work: Callable[..., dict[str, Any]], *arguments: Any) -> dict[str, Any]:
        """The answer of some work for a client, with its seconds."""
        begin = time.perf_counter()
        self.target.cache, self.target.taps = client.cache, client.taps
        try:
            with torch.inference_mode():
                answer = work(client, *arguments)
        finally:
            client.used += (seconds := time.perf_counter() - begin)
        return {"kind": "answer", **answer, "seconds": seconds}

    def _refuse(self, peer: bytes, number: int, error: Exception) -> None:
        """Answer with an error. A fault of the server ends the client's session; the server goes on for other clients."""
        message = one_line(error)
        if not isinstance(error, SpecBenchError):
            self._drop(peer)
            message = f"the server failed at this request: {message}"
        elif (client := self.clients.get(peer)) is not None:
            client.streamed = None
        self._send(peer, protocol.encode({"kind": "error", "message": message[:1000], "n": number}))

    def _welcome(self, peer: bytes, request: protocol.Hello) -> dict[str, Any]:
        if request["version"] != protocol.VERSION:
            raise SpecBenchError(
                f"this server speaks version {protocol.VERSION}, you speak {request['version']}; install the same SpecBench"
            )
        if peer not in self.clients and len(self.clients) >= self.limits["clients"]:
            self._drop_gone()
        if peer not in self.clients and len(self.clients) >= self.limits["clients"]:
            raise SpecBenchError(f"this server has its {self.limits['clients']} clients already; try again later")
        self.clients.setdefault(peer, Client(self.target.new_cache(0)))
        description = {"version": protocol.VERSION, "fingerprint": self.fingerprint, "limits": self.limits}
        return {"kind": "welcome", **description, "condensers": list(self.condensers)}

    # Passes -------------------------------------------------------------------------------------------------------------

    def _begin(self, client: Client, request: protocol.Begin) -> dict[str, Any]:
        prompt, limits = request["prompt"], self.limits
        requests.require("prompt", "tokens", len(prompt), limits["prompt"])
        requests.require("capacity", "positions", request["capacity"], limits["context"] + limits["nodes"])
        if not len(prompt) < request["capacity"]:
            raise SpecBenchError(f"a prompt of {len(prompt)} tokens has no room in {request['capacity']} positions")
        requests.require_ids(prompt, self.target.vocab_size)
        try:
            taps = protocol.unpack_taps(request["taps"])
            if taps.condensed is not None:
                if taps.condensed not in self.condensers:
                    raise SpecBenchError("this server does not have the network that condenses the client's states")
                taps = replace(self.condensers[taps.condensed].taps, observe_top_k=taps.observe_top_k)
            self.target.reset(request["capacity"], taps)
        except IndexError as error:
            raise SpecBenchError(one_line(error)) from error
        client.taps, client.int8_states, client.streamed = self.target.taps, request["eight"], None
        verify = request["judged"]
        client.verifier = None if verify is None else LocalVerifier(protocol.unpack_verify(verify), self.target.device)
        states = self.target.prefill(torch.tensor(prompt, device=self.target.device))
        answer: dict[str, Any] = {}
        if client.verifier is None:
            answer["logits"] = protocol.pack(states.logits[-1])
        elif not request["resumed"]:
            answer["token"] = client.root = client.verifier.first(states)
            client.streamed = request["n"] if taps.free_running else None
        return answer if request["resumed"] else answer | self._states(states, client)

    def _pass(self, client: Client, request: protocol.Pass) -> dict[str, Any]:
        if client.verifier is None:
            raise SpecBenchError("a tree without a prompt; begin a generation first")
        tree = requests.tree(request, self.limits["nodes"], self.target.vocab_size, self.target.device)
        if client.cache.length + len(tree) > client.cache.capacity:
            raise SpecBenchError(f"a tree of {len(tree)} nodes has no room left in {client.cache.capacity} positions")
        return self._verified(client, tree)

    def _verified(self, client: Client, tree: DraftTree) -> dict[str, Any]:
        """Run a tree, verify it, keep the accepted rows: the answer without its seconds."""
        assert client.verifier is not None
        states = self.target.forward(tree)
        verdict, drafted = client.verifier.verify(tree, states)
        kept = torch.tensor([0, *verdict.path], device=self.target.device)
        answer = self._observed_logits(states, client.taps)
        answer |= self._states(states.select(kept), client)  # before `keep`, which moves the tapped cache rows
        self.target.keep(kept)
        client.root = verdict.bonus
        return {"path": verdict.path, "drafted": drafted, "token": verdict.bonus, **answer}

    def _states(self, states: TargetStates, client: Client) -> dict[str, Any]:
        """The tapped states, as parts of an answer."""
        taps, pack = client.taps, partial(protocol.pack, int8=client.int8_states)
        if taps.condensed is not None:
            return {"condensed": [pack(part) for part in self.condensers[taps.condensed].compress_states(states)]}
        parts: dict[str, Any] = {"last": pack(states.last)} if taps.last else {}
        if taps.hidden:
            parts["hidden"] = [pack(states.hidden[i]) for i in taps.hidden]
        if taps.kv:
            parts["kv"] = [pack(part) for i in taps.kv for part in states.kv[i]]
        return parts

    def _observed_logits(self, states: TargetStates, taps: Taps) -> dict[str, Any]:
        """Logits of every node, for drafters that learn from rejected nodes too."""
        if taps.observe_top_k is None:
            return {"logits": protocol.pack(states.logits)}
        if not taps.observe_top_k:
            return {}
        values, ids = states.logits.topk(min(taps.observe_top_k, self.target.vocab_size))
        return {"ids": ids.tolist(), "logits": protocol.pack(values)}

    # Clients ------------------------------------------------------------------------------------------------------------

    def _send(self, peer: bytes, reply: bytes) -> None:
        """Send an answer now, or as soon as the client has received those before; its next request makes it void."""
        client = self.clients.get(peer)
        try:
            self.socket.send_multipart([peer, reply], zmq.NOBLOCK)
            if client is not None:
                client.unsent, client.seen = None, time.monotonic()
        except zmq.Again:
            if client is not None:
                client.unsent = reply
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
            client.cache.begin(0)
            client.cache.storage, client.cache.capacity, client.verifier, client.streamed = {}, 0, None, None
