"""A target on a server; this side holds only the embedding, the final norm and the LM head.

A cycle is one round trip. The server verifies the tree and returns the accepted path with the tapped states of its nodes
only, so that the decoding loop and the drafters are the same as with a local target.
"""

import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from specbench.common.errors import SpecBenchError, one_line
from specbench.common.types import MAX_NODES
from specbench.engine.interface import DraftTree, Taps, TargetStates, Verification
from specbench.engine.language_model import LanguageModel
from specbench.engine.model_files import heads_of
from specbench.engine.pretrained import read_ends
from specbench.engine.tensors import dtype_name
from specbench.engine.tree import root_only
from specbench.engine.verify import Lossless, Sampler, Verifier, VerifyConfig
from specbench.remote import protocol, requests
from specbench.remote.client import Connection, LinkLost, Traffic

RETRY_S = 0.2  # between attempts to reconnect

OnDisconnect = Literal["wait", "stop", "continue"]


@dataclass
class VerifiedStates(TargetStates):
    """States of the accepted nodes, and the path. logits: of all nodes, for a drafter that observes trees."""

    token: int = 0
    verified: Verification | None = None

    def select(self, nodes: Tensor) -> TargetStates:
        assert len(nodes) == len(self.tokens)
        return self

    def first(self, count: int) -> "VerifiedStates":
        """The states of the first nodes alone."""
        part = super().select(torch.arange(count, device=self.tokens.device))
        assert isinstance(part, VerifiedStates)
        return part


class RemoteVerifier:
    """Reads what the server accepted, which it sent with the states."""

    def first(self, states: TargetStates) -> int:
        assert isinstance(states, VerifiedStates)
        return states.token

    def verify(self, tree: DraftTree, states: TargetStates) -> Verification:
        assert isinstance(states, VerifiedStates) and states.verified is not None
        return states.verified


class RemoteTarget(LanguageModel):
    """A `VerificationTarget` that a server runs.

    Args:
        model: see `pretrained.read_ends`. path: its folder, whose fingerprint must be the server's.
        address: of the server, tcp://host:port. timeout_s: of an answer, and of reconnecting.
        on_disconnect: `wait` reconnects and continues from the verified tokens; the others raise `LinkLost`, after which
            the caller stops, or continues with the drafter alone, for which `continue` stores the states.
        cut_after: close the connection in every generation after this many tokens, as an experiment.
        int8_states: receive states rounded to int8, which may change drafts but not what is verified.

    Attributes:
        token_ids: prompt and verified ids of the current generation. states: their states, see `on_disconnect`.
        server: the server's own address. emulator: process of the emulated network on the way to it.
        cutting: is `cut_after` in force?
    """

    replayed = False

    def __init__(
        self,
        model: Any,
        path: Path,
        address: str,
        timeout_s: float = 60.0,
        on_disconnect: OnDisconnect = "stop",
        cut_after: int | None = None,
        int8_states: bool = False,
    ):
        super().__init__(model, path)
        self.connection = Connection(address, timeout_s, self._answer_bytes())
        self.server = address
        self.emulator: subprocess.Popen[str] | None = None
        self.on_disconnect, self.cut_after, self.cutting = on_disconnect, cut_after, True
        self.int8_states = int8_states
        self._open()
        self.max_context = min(self.max_context, self.connection.welcome["limits"]["context"])
        self.reset(0)

    @classmethod
    def at(cls, address: str, path: Path, dtype: torch.dtype, device: torch.device, **more: Any) -> "RemoteTarget":
        """The target of the server at this address; the local folder needs only what `read_ends` reads."""
        return cls(read_ends(path, dtype, device), path, address, **more)

    def _answer_bytes(self) -> int:
        """Bytes of an answer at most: of every position the states of all layers, of `MAX_NODES` nodes all logits."""
        _, heads, dim = heads_of(self.config)
        position = (self.layers + 1) * self.hidden_size + 2 * self.layers * heads * dim
        return protocol.FRAME + 4 * self.max_context * position + 8 * MAX_NODES * self.vocab_size

    def _open(self) -> None:
        self.connection.open()
        served, address = self.connection.welcome["fingerprint"], self.connection.address
        if served != self.fingerprint():
            self.connection.close()
            raise SpecBenchError(
                f"{address} serves another target ({served}) than {self.path} ({self.fingerprint()}); give both one model="
            )
        theirs, own = self.connection.welcome["dtype"], dtype_name(self.dtype)
        if theirs != own:  # of which answers, ties and the keys of rows depend
            self.connection.close()
            raise SpecBenchError(f"{address} computes in {theirs}, this side in {own}; set model.dtype={theirs}")

    def close(self) -> None:
        """Free the server's memory of this client, and disconnect."""
        self.connection.send({"kind": "end"})
        self.connection.close()

    @property
    def traffic(self) -> Traffic:
        return self.connection.traffic

    def optimize_for_inference(self) -> None:
        self.packing.optimize([self.head])

    def reset(self, capacity: int, taps: Taps | None = None) -> None:
        taps = (taps or Taps()).resolve(self.layers)
        condensed = taps.condensed in self.connection.welcome["condensers"]
        self.taps = replace(taps, hidden=(), kv=(), last=False) if condensed else replace(taps, condensed=None)
        self.capacity = capacity
        self.verify_config: VerifyConfig | None = None
        self.token_ids: list[int] = []
        self.states: list[TargetStates] = []
        self.emitted = 0
        self.connection.traffic = Traffic()

    def verifier(self, config: VerifyConfig) -> Verifier:
        protocol.pack_verify(config)  # raises if the server does not know the rule
        self.verify_config = config
        return RemoteVerifier()

    def prefill(self, tokens: Tensor) -> TargetStates:
        """Send a prompt [N]; without a verifier the server returns logits of the last position instead of a token."""
        answer = self._request_prompt(self._begin(tokens.tolist()))
        self.token_ids, self.emitted = tokens.tolist(), 1
        traffic = self.traffic
        traffic.prompt_bytes = sum(traffic.sent.values()) + sum(traffic.received.values())
        traffic.prompt_s = traffic.server_s
        with self._refusing_answers():
            states = self._received(answer, tokens, 0)
            self._store(states)
            if self.verify_config is None:
                states.logits = protocol.unpack(answer["logits"], self.device, (self.vocab_size,))[None]
            else:
                states.token = self._token(answer)
        return states

    def forward(self, tree: DraftTree) -> TargetStates:
        """Send a tree and return the states of its accepted nodes; in a stream, receive the next token instead."""
        assert len(tree) == 1 or not self.taps.free_running, "a stream has no drafts"
        answer = self._request(None if self.taps.free_running else requests.message(tree), int(tree.tokens[0]))
        with self._refusing_answers():
            return self._verified(tree, answer)

    def _verified(self, tree: DraftTree, answer: Any) -> VerifiedStates:
        """The states in the answer to a tree. Raises an error of any kind if it does not belong to the tree."""
        tokens, ranks, parents = tree.tokens.tolist(), tree.ranks.tolist(), tree.parents.tolist()
        path, start = answer["path"], len(self.token_ids)
        connected = [parents[node] for node in path] == [0, *path][: len(path)]
        if not (connected and len(path) <= answer["drafted"] <= len(tokens)):
            raise ValueError("a path that the tree does not have")
        kept = [tokens[node] for node in (0, *path)]
        states = self._received(answer, torch.tensor(kept, device=self.device), start)
        token, drafted = self._token(answer), answer["drafted"]
        if len(kept) > (room := self._tokens_before_cut()):
            token, drafted, path, kept = kept[room], room - 1, path[: room - 1], kept[:room]
            states = states.first(room)
        self._store(states)
        self.token_ids, self.emitted = self.token_ids + kept, self.emitted + len(kept)
        states.verified = Verification(path, kept[1:], [ranks[node] for node in path], token, drafted)
        if "logits" in answer:
            states.logits = self._logits(answer, len(tokens))
        return states

    def keep(self, nodes: Tensor) -> None:
        """Nothing to do: the server keeps the accepted rows itself."""

    def tapped(
        self, tokens: Tensor, taps: Taps, positions: Tensor | None = None, mask: Tensor | None = None
    ) -> tuple[Tensor, dict[int, Tensor], dict[int, tuple[Tensor, Tensor]]]:
        assert len(tokens) == 1 and positions is None and mask is None, "one sequence at a time"
        self.reset(tokens.shape[1] + 1, taps)
        states = self.prefill(tokens[0])
        hidden = {i: h[None] for i, h in states.hidden.items()}
        return states.last[None], hidden, {i: (k[None], v[None]) for i, (k, v) in states.kv.items()}

    def greedy(self, start: tuple[int, ...], count: int) -> Tensor:
        self.reset(len(start) + count, Taps(last=False))
        verifier = self.verifier(VerifyConfig(Lossless(), Sampler()))
        ids = [*start, verifier.first(self.prefill(torch.tensor(start, device=self.device)))]
        while len(ids) < len(start) + count:
            tree = root_only(ids[-1], self.device)
            ids.append(verifier.verify(tree, self.forward(tree)).bonus)
        return torch.tensor([ids], device=self.device)

    # Messages -----------------------------------------------------------------------------------------------------------

    def _begin(self, tokens: list[int], again: bool = False, resumed: bool = False) -> dict[str, Any]:
        """A `protocol.Begin`. again: on a new connection, with another seed, else the first draws would be repeated."""
        config = self.verify_config
        if again and config is not None and config.seed is not None:
            config = replace(config, seed=(config.seed + len(tokens)) % (1 << 62))
        return {
            "kind": "begin",
            "prompt": tokens,
            "capacity": self.capacity,
            "taps": protocol.pack_taps(self.taps),
            "judged": None if config is None else protocol.pack_verify(config),
            "resumed": resumed,
            "eight": self.int8_states,
        }

    def _request_prompt(self, begin: Mapping[str, Any]) -> Any:
        """The answer to a prompt, over several connections if `on_disconnect` is `wait`."""

        def first() -> Any:
            if self.connection.socket is None:
                self._open()
            return self.connection.request(begin)

        return self._retried(first, lambda: self.connection.request(begin))

    def _request(self, message: Mapping[str, Any] | None, root: int) -> Any:
        """The answer to a tree with this root, over several connections if `on_disconnect` is `wait`.

        message: None for the next token of a stream.
        """

        def first() -> Any:
            if self._tokens_before_cut() <= 0:
                self.connection.close()
            if message is not None:
                return self.connection.request(message)
            return self._restart(None, root) if root in self.stop_ids else self.connection.receive()  # a stream ends there

        def again() -> Any:
            answer = self._restart(message, root)
            self.traffic.resumed += 1
            return answer

        return self._retried(first, again)

    def _retried(self, first: Callable[[], Any], again: Callable[[], Any]) -> Any:
        """The answer to a first attempt, or to further ones on new connections until `timeout_s` are over."""
        try:
            return first()
        except (LinkLost, protocol.ServerFull):
            if self.on_disconnect != "wait":
                raise
        deadline = time.monotonic() + self.connection.timeout_s
        while True:
            try:
                self._open()
                return again()
            except (LinkLost, protocol.ServerFull):  # full: the server may still count the lost connection
                if time.monotonic() > deadline:
                    raise
                time.sleep(RETRY_S)

    def _tokens_before_cut(self) -> int:
        """How many tokens the link still brings before it is cut in this generation; very many where it is not cut."""
        if not self.cutting or self.cut_after is None or self.traffic.resumed:
            return sys.maxsize
        return self.cut_after - self.emitted

    def _restart(self, message: Mapping[str, Any] | None, root: int) -> Any:
        """The answer after a new `Begin`; a stream's next token is the first one after a prompt that includes the root."""
        if message is None:
            return self.connection.request(self._begin([*self.token_ids, root], again=True)) | {"path": [], "drafted": 0}
        self.connection.request(self._begin(self.token_ids, again=True, resumed=True))
        return self.connection.request(message)

    def _received(self, answer: Any, tokens: Tensor, start: int) -> VerifiedStates:
        """The states in an answer, of `tokens` [A] at positions from `start` on."""
        count = len(tokens)
        _, heads, dim = heads_of(self.config)
        kv_shape = (heads, count, dim)
        kv = iter([self._tensor(part, kv_shape) for part in answer.get("kv", [])])
        hidden = [self._tensor(part, (count, self.hidden_size)) for part in answer.get("hidden", [])]
        empty = torch.empty(count, 0, device=self.device, dtype=self.dtype)
        return VerifiedStates(
            tokens=tokens,
            positions=torch.arange(start, start + count, device=self.device),
            last=self._tensor(answer["last"], (count, self.hidden_size)) if self.taps.last else empty,
            logits=empty,
            hidden=dict(zip(self.taps.hidden, hidden, strict=True)),
            kv=dict(zip(self.taps.kv, zip(kv, kv, strict=True), strict=True)),
            condensed=tuple(self._tensor(part, (count, *part["s"][1:])) for part in answer.get("condensed", [])),
        )

    def _store(self, states: TargetStates) -> None:
        """Keep states for a drafter that goes on alone."""
        if self.on_disconnect == "continue":
            self.states.append(states)

    @contextmanager
    def _refusing_answers(self) -> Iterator[None]:
        """Around code that reads an answer, of which `protocol` has validated the types alone."""
        try:
            yield
        except Exception as error:  # a missing part, a node that the tree does not have, a tensor of another shape
            reason = f"{type(error).__name__}: {one_line(error)}"
            server = self.connection.address
            raise SpecBenchError(
                f"{server} sent an answer that does not fit ({reason}); is it a server of SpecBench?"
            ) from error

    def _token(self, answer: Any) -> int:
        if answer["token"] >= self.vocab_size:
            raise ValueError(f"token {answer['token']}, but the target has {self.vocab_size}")
        return int(answer["token"])

    def _tensor(self, packed: protocol.WireTensor, shape: tuple[int, ...]) -> Tensor:
        tensor = protocol.unpack(packed, self.device, shape).to(self.dtype)
        if not bool(tensor.isfinite().all()):
            raise ValueError("states that are not finite")
        return tensor

    def _logits(self, answer: Any, nodes: int) -> Tensor:
        """Logits [N, V]; those of ids that the server did not send are -inf."""
        if "ids" not in answer:
            return protocol.unpack(answer["logits"], self.device, (nodes, self.vocab_size)).to(self.dtype)
        ids = torch.tensor(answer["ids"], device=self.device)
        logits = torch.full((nodes, self.vocab_size), -torch.inf, device=self.device, dtype=self.dtype)
        return logits.scatter(1, ids, protocol.unpack(answer["logits"], self.device, tuple(ids.shape)).to(self.dtype))
