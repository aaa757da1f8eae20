"""The target's side of the wire: several clients, one pass at a time, each with a cache of its own.

One thread takes messages as they come, clients in turn, and runs a whole pass for each. A bad message is answered
with one line to its sender; other clients do not notice. Knows no drafter.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
import zmq

from specbench.common.errors import SpecBenchError, one_line
from specbench.engine import tree as trees
from specbench.engine.cache import KVCache
from specbench.engine.interface import DraftTree, Taps, TargetStates
from specbench.engine.target import Target
from specbench.engine.tree import root_only
from specbench.engine.verify import LocalVerifier
from specbench.remote import protocol
from specbench.remote.transport import server_socket

POLL_MS = 500  # between looks at who has vanished


@dataclass
class Client:
    """What a server holds of one client.

    Attributes:
        eight: do its states travel as int8?
        streamed: number of the request that plain decoding answers, token by token; None if it is asked for each tree.
        root: the last token of such a stream.
    """

    cache: KVCache
    taps: Taps = field(default_factory=Taps)
    judge: LocalVerifier | None = None
    eight: bool = False
    streamed: int | None = None
    root: int = 0
    seen: float = field(default_factory=time.monotonic)

    def forget(self) -> None:
        """End its generation and free its cache."""
        self.cache.begin(0)
        self.cache.storage, self.cache.capacity, self.judge, self.streamed = {}, 0, None, None


class Server:
    """A target for clients.

    Args:
        address: tcp://host:port; port 0 takes a free one.
        limits: what a client may ask for, see `protocol.Limits`.
        idle_s: a client that says nothing for so long is forgotten.
        condensers: drafters bound to the target that condense states before they travel, see `Drafter.compress_states`.

    Attributes:
        address: with the port that was taken.
        clients: by ZeroMQ's name of their connection.
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

    def run(self, until: Callable[[], bool] = lambda: False) -> None:
        """Serve until asked to stop; the socket is closed then."""
        looked = time.monotonic()
        try:
            while not (self.stopping or until()):
                streams = [pair for pair in self.clients.items() if pair[1].streamed is not None]
                if self.socket.poll(0 if streams else POLL_MS):
                    self._turn()
                for peer, client in streams:
                    self._stream(peer, client)
                if time.monotonic() - looked > POLL_MS / 1000:
                    self._look()
                    looked = time.monotonic()
        finally:
            self.clients.clear()
            self.socket.close()

    def _turn(self) -> None:
        """Receive one message and answer it."""
        peer, *frames = self.socket.recv_multipart()
        number = 0
        try:
            if len(frames) != 1:
                raise SpecBenchError(f"a message of {len(frames)} frames, where one was expected")
            request = protocol.decode(frames[0], protocol.REQUEST)
            number = request["n"]
            reply = self._reply(peer, request)
        except SpecBenchError as error:
            reply = {"kind": "error", "said": one_line(error)[:1000]}
        except Exception as error:  # a fault of ours; others go on
            self._drop(peer)
            reply = {"kind": "error", "said": f"the server failed at this request: {one_line(error)}"[:1000]}
        if reply is not None:
            self._send(peer, reply | {"n": number})

    def _reply(self, peer: bytes, request: Any) -> dict[str, Any] | None:
        if request["kind"] == "hello":
            return self._welcome(peer, request)
        if (client := self.clients.get(peer)) is None:
            raise SpecBenchError("say hello first: this server does not know you, or has forgotten you")
        client.seen = time.monotonic()
        if request["kind"] == "end":
            self._drop(peer)
            return None
        return self._timed(client, self._begun if request["kind"] == "begin" else self._passed, request)

    def _timed(self, client: Client, work: Callable[..., dict[str, Any]], *arguments: Any) -> dict[str, Any]:
        """The answer that some work for a client gives, with its seconds."""
        begin = time.perf_counter()
        self.target.cache, self.target.taps = client.cache, client.taps
        with torch.inference_mode():
            answer = work(client, *arguments)
        return {"kind": "answer", **answer, "seconds": time.perf_counter() - begin}

    def _stream(self, peer: bytes, client: Client) -> None:
        """One more token of plain decoding, until a stop token or the end of the requested positions."""
        if client.streamed is None:  # its last message has ended it
            return
        over = client.root in self.target.stop_ids or client.cache.length >= client.cache.capacity
        number, client.streamed = client.streamed, None
        if not over and self.clients.get(peer) is client:
            reply = self._timed(client, self._judged, root_only(client.root, self.target.device))
            self._send(peer, reply | {"n": number})
            client.streamed, client.seen = number, time.monotonic()

    def _welcome(self, peer: bytes, request: protocol.Hello) -> dict[str, Any]:
        if request["version"] != protocol.VERSION:
            raise SpecBenchError(
                f"this server speaks version {protocol.VERSION}, you speak {request['version']}; install the same SpecBench"
            )
        if peer not in self.clients and len(self.clients) >= self.limits["clients"]:
            self._look()
        if peer not in self.clients and len(self.clients) >= self.limits["clients"]:
            raise SpecBenchError(f"this server has its {self.limits['clients']} clients already; try again later")
        self.clients.setdefault(peer, Client(self.target.new_cache(0)))
        description = {"version": protocol.VERSION, "fingerprint": self.fingerprint, "limits": self.limits}
        return {"kind": "welcome", **description, "condensers": list(self.condensers)}

    # Passes -------------------------------------------------------------------------------------------------------------

    def _begun(self, client: Client, request: protocol.Begin) -> dict[str, Any]:
        prompt, limits = request["prompt"], self.limits
        _require("prompt", "tokens", len(prompt), limits["prompt"])
        _require("capacity", "positions", request["capacity"], limits["context"] + limits["nodes"])
        if not len(prompt) < request["capacity"]:
            raise SpecBenchError(f"a prompt of {len(prompt)} tokens has no room in {request['capacity']} positions")
        self._known_ids(prompt)
        try:
            taps = protocol.unpack_taps(request["taps"])
            if taps.condensed is not None:
                if taps.condensed not in self.condensers:
                    raise SpecBenchError("this server has not the network that condenses states for you")
                taps = replace(self.condensers[taps.condensed].taps, observe_top_k=taps.observe_top_k)
            self.target.reset(request["capacity"], taps)
        except IndexError as error:
            raise SpecBenchError(one_line(error)) from error
        client.taps, client.eight, client.streamed = self.target.taps, request["eight"], None
        verify = request["judged"]
        client.judge = None if verify is None else LocalVerifier(protocol.unpack_verify(verify), self.target.device)
        states = self.target.prefill(torch.tensor(prompt, device=self.target.device))
        found: dict[str, Any] = {}
        if client.judge is None:
            found["logits"] = protocol.pack(states.logits[-1])
        elif not request["resumed"]:
            found["token"] = client.root = client.judge.first(states)
            client.streamed = request["n"] if taps.free_running else None
        return found if request["resumed"] else found | self._states(states, client)

    def _passed(self, client: Client, request: protocol.Pass) -> dict[str, Any]:
        if client.judge is None:
            raise SpecBenchError("a tree without a prompt; begin a generation first")
        client.streamed = None
        tree = self._tree(request)
        if client.cache.length + len(tree) > client.cache.capacity:
            raise SpecBenchError(f"a tree of {len(tree)} nodes has no room left in {client.cache.capacity} positions")
        return self._judged(client, tree)

    def _judged(self, client: Client, tree: DraftTree) -> dict[str, Any]:
        """Run a tree, verify it, keep the accepted rows: the answer without its seconds."""
        assert client.judge is not None
        states = self.target.forward(tree)
        verdict, drafted = client.judge.verify(tree, states)
        kept = torch.tensor([0, *verdict.path], device=self.target.device)
        found = self._observed_logits(states, client.taps)
        found |= self._states(states.select(kept), client)  # before keeping, which moves what is tapped
        self.target.keep(kept)
        client.root = verdict.bonus
        return {"path": verdict.path, "drafted": drafted, "token": verdict.bonus, **found}

    def _states(self, states: TargetStates, client: Client) -> dict[str, Any]:
        taps, pack = client.taps, partial(protocol.pack, eight=client.eight)
        if taps.condensed is not None:
            return {"condensed": [pack(part) for part in self.condensers[taps.condensed].compress_states(states)]}
        found: dict[str, Any] = {"last": pack(states.last)} if taps.last else {}
        if taps.hidden:
            found["hidden"] = [pack(states.hidden[i]) for i in taps.hidden]
        if taps.kv:
            found["kv"] = [pack(part) for i in taps.kv for part in states.kv[i]]
        return found

    def _observed_logits(self, states: TargetStates, taps: Taps) -> dict[str, Any]:
        """Logits of every node, for drafters that learn from rejected ones as well."""
        if taps.observe_top_k is None:
            return {"logits": protocol.pack(states.logits)}
        if not taps.observe_top_k:
            return {}
        values, ids = states.logits.topk(min(taps.observe_top_k, self.target.vocab_size))
        return {"ids": ids.tolist(), "logits": protocol.pack(values)}

    # What a client says -------------------------------------------------------------------------------------------------

    def _tree(self, request: protocol.Pass) -> DraftTree:
        """The tree of a request. Raises `SpecBenchError` if it is none."""
        tokens, parents = request["tokens"], [-1, *request["parents"]]
        count, device = len(tokens), self.target.device
        _require("tree", "nodes", count, self.limits["nodes"])
        self._known_ids(tokens)
        if len(parents) != count or any(parent >= node for node, parent in enumerate(parents)):
            raise SpecBenchError("a tree in which a node does not stand behind its parent")
        depths = trees.depths_of(parents)
        drawn = request.get("drawn")
        ranks, width = [0] * count, 0
        if drawn is not None:
            ranks, width = drawn["ranks"], drawn["width"]
            if len(ranks) != count or width > count or any(rank >= width for rank in ranks[1:]):
                raise SpecBenchError("a tree whose ranks do not fit it")
        ids, above, levels, rank = torch.tensor([tokens, parents, depths, ranks], device=device).unbind()
        tree = trees.build(ids, above, levels, rank, max(depths), width)
        if others := request.get("others"):
            tree.acceptable = torch.ones(count, dtype=torch.bool, device=device)
            tree.acceptable[self._nodes(others, count)] = False
            tree.acceptable[0] = True
        if drawn is not None:
            nodes = self._nodes(drawn["nodes"], count)
            rows = protocol.unpack(drawn["q"], device, (len(nodes), self.target.vocab_size)).float()
            if not bool((rows >= 0).all()):  # NaN is not either
                raise SpecBenchError("a tree whose q is no probability")
            tree.q = torch.zeros(count, self.target.vocab_size, device=device).index_copy_(0, nodes, rows)
            tree.replacement = drawn["replacement"]
        return tree

    def _nodes(self, numbers: list[int], count: int) -> torch.Tensor:
        if len(set(numbers)) != len(numbers) or any(node >= count for node in numbers):
            raise SpecBenchError(f"nodes that a tree of {count} has not")
        return torch.tensor(numbers, dtype=torch.long, device=self.target.device)

    def _known_ids(self, tokens: list[int]) -> None:
        if max(tokens) >= self.target.vocab_size:
            raise SpecBenchError(f"token {max(tokens)}, but the target has {self.target.vocab_size}")

    # Who is there -------------------------------------------------------------------------------------------------------

    def _send(self, peer: bytes, reply: Mapping[str, Any]) -> None:
        try:
            self.socket.send_multipart([peer, protocol.encode(reply)], zmq.NOBLOCK)
        except zmq.ZMQError:  # vanished, or takes no answers
            self._drop(peer)

    def _look(self) -> None:
        """Drop clients that are gone or idle."""
        now = time.monotonic()
        for peer, client in list(self.clients.items()):
            if now - client.seen > self.idle_s:
                self._drop(peer)
            else:
                self._send(peer, {"kind": "alive"})

    def _drop(self, peer: bytes) -> None:
        if (client := self.clients.pop(peer, None)) is not None:
            client.forget()


def _require(what: str, unit: str, found: int, limit: int) -> None:
    if found > limit:
        raise SpecBenchError(f"a {what} of {found} {unit}, but this server takes {limit}")
