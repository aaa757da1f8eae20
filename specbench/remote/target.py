"""A target on a server: in place of `engine.target.Target`, it holds only the embedding, the final norm and the LM head.

A cycle is one round trip. The server verifies the tree and returns the verdict with the tapped states of the accepted nodes
only, so that the decoding loop and the drafters are the same as with a local target.

When the link breaks in the middle of a generation, a new connection goes on from the prompt and what was verified (`wait`),
or the generation ends with `LinkLost`, and the caller decides what becomes of the cell.
"""

import subprocess
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from specbench.common.errors import SpecBenchError
from specbench.engine.interface import DraftTree, Taps, TargetStates, Verdict
from specbench.engine.language_model import LanguageModel
from specbench.engine.pretrained import read_ends
from specbench.engine.tree import root_only
from specbench.engine.verify import Lossless, Sampler, Verifier, VerifyConfig
from specbench.remote import protocol
from specbench.remote.client import Connection, LinkLost, Traffic

AGAIN_S = 0.2  # between attempts to connect anew

Then = Literal["wait", "stop", "continue"]


@dataclass
class VerifiedStates(TargetStates):
    """States of accepted nodes, and the server's verdict. logits: of all nodes, for a drafter that reviews them."""

    token: int = 0
    verdict: Verdict | None = None
    drafted: int = 0

    def select(self, nodes: Tensor) -> TargetStates:
        """All nodes here are accepted ones."""
        assert len(nodes) == len(self.tokens)
        return self


class RemoteVerifier:
    """Hands out the verdict that the server sent with the states."""

    def first(self, states: TargetStates) -> int:
        assert isinstance(states, VerifiedStates)
        return states.token

    def verify(self, tree: DraftTree, states: TargetStates) -> tuple[Verdict, int]:
        assert isinstance(states, VerifiedStates) and states.verdict is not None
        return states.verdict, states.drafted


class RemoteTarget(LanguageModel):
    """A target that a server runs, for the loop a `VerificationTarget` like a local one.

    Args:
        model: see `pretrained.read_ends`. path: its folder, whose fingerprint must be the server's.
        address: of the server, tcp://host:port.
        patience_s: how long an answer, or a new connection, may take.
        then: when the link breaks, `wait` for another and go on; or leave it to the caller, by `LinkLost`, to `stop` or to
            `continue` with the drafter alone, for which states are kept.
        cut_after: break the link in every generation once so many tokens are there.
        eight: ask for states rounded to int8. What is verified is the same; what is drafted may be another.

    Attributes:
        connection: to the server. text: prompt and verified ids of the current generation. kept: their states, see `then`.
        server: its own address; emulator: of a network on the way to it, a process.
        cutting: does `cut_after` count at the moment?
    """

    replayed = False

    def __init__(
        self,
        model: Any,
        path: Path,
        address: str,
        patience_s: float = 60.0,
        then: Then = "stop",
        cut_after: int | None = None,
        eight: bool = False,
    ):
        super().__init__(model, path)
        self.connection = Connection(address, patience_s)
        self.server = address
        self.emulator: subprocess.Popen[str] | None = None
        self.then, self.cut_after, self.cutting, self.eight = then, cut_after, True, eight
        self._open()
        context = self.connection.welcome["limits"]["context"]
        self.max_context = min(self.max_context, context)
        self.reset(0)

    @classmethod
    def at(cls, address: str, path: Path, dtype: torch.dtype, device: torch.device, **more: Any) -> "RemoteTarget":
        """The server's target; the local folder needs only the files that a client reads."""
        return cls(read_ends(path, dtype, device), path, address, **more)

    def _open(self) -> None:
        self.connection.open()
        theirs = self.connection.welcome["fingerprint"]
        if theirs != self.fingerprint():
            self.connection.close()
            raise SpecBenchError(
                f"{self.connection.address} serves another target ({theirs}) than {self.path} ({self.fingerprint()}); "
                "start it with the same model="
            )

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
        there = taps.condensed in self.connection.welcome["condensers"]
        self.taps = replace(taps, hidden=(), kv=(), last=False) if there else replace(taps, condensed=None)
        self.capacity = capacity
        self.terms: VerifyConfig | None = None
        self.text: list[int] = []
        self.kept: list[TargetStates] = []
        self.emitted = 0
        self.connection.traffic = Traffic()

    def verifier(self, terms: VerifyConfig) -> Verifier:
        protocol.pack_verify(terms)  # refused here if it cannot travel
        self.terms = terms
        return RemoteVerifier()

    def prefill(self, tokens: Tensor) -> TargetStates:
        """Send a prompt [N]; without a judge the logits of its last position come back instead of a token."""
        if self.connection.socket is None:
            self._open()
        answer = self.connection.request(self._begin(tokens.tolist()))
        self.text, self.emitted = tokens.tolist(), 1
        traffic = self.traffic
        traffic.prompt_bytes = sum(traffic.sent.values()) + sum(traffic.received.values())
        traffic.prompt_s = traffic.server_s
        states = self._received(answer, tokens, 0)
        if self.terms is None:
            states.logits = protocol.unpack(answer["logits"], self.device, (self.vocab_size,))[None]
        return states

    def forward(self, tree: DraftTree) -> TargetStates:
        """Send a tree and return the states of its accepted nodes; of a stream, wait for the next token instead."""
        tokens = tree.tokens.tolist()
        if self.taps.free_running:
            assert len(tokens) == 1, "who drafts has to ask"
            answer = self._asked(None, tokens[0])
        else:
            answer = self._asked(_message(tree), tokens[0])
        path = answer["path"]
        ranks = tree.ranks.tolist()
        start = len(self.text)
        kept = [tokens[node] for node in (0, *path)]
        self.text, self.emitted = self.text + kept, self.emitted + len(kept)
        states = self._received(answer, torch.tensor(kept, device=self.device), start)
        states.verdict = Verdict(path, kept[1:], [ranks[node] for node in path], answer["token"])
        states.drafted = answer["drafted"]
        if "logits" in answer:
            states.logits = self._logits(answer, len(tokens))
        return states

    def keep(self, nodes: Tensor) -> None:
        """Nothing to do: the server has kept the accepted rows."""

    def tapped(
        self, tokens: Tensor, taps: Taps, positions: Tensor | None = None, mask: Tensor | None = None
    ) -> tuple[Tensor, dict[int, Tensor], dict[int, tuple[Tensor, Tensor]]]:
        assert len(tokens) == 1 and positions is None and mask is None, "one text at a time"
        self.reset(tokens.shape[1] + 1, taps)
        states = self.prefill(tokens[0])
        hidden = {i: h[None] for i, h in states.hidden.items()}
        return states.last[None], hidden, {i: (k[None], v[None]) for i, (k, v) in states.kv.items()}

    def greedy(self, start: tuple[int, ...], count: int) -> Tensor:
        self.reset(len(start) + count, Taps(last=False))
        judge = self.verifier(VerifyConfig(Lossless(), Sampler()))
        text = [*start, judge.first(self.prefill(torch.tensor(start, device=self.device)))]
        while len(text) < len(start) + count:
            tree = root_only(text[-1], self.device)
            text.append(judge.verify(tree, self.forward(tree))[0].bonus)
        return torch.tensor([text], device=self.device)

    # The wire -----------------------------------------------------------------------------------------------------------

    def _begin(self, tokens: list[int], again: bool = False, resumed: bool = False) -> dict[str, Any]:
        terms = self.terms
        if again and terms is not None and terms.seed is not None:
            terms = replace(terms, seed=(terms.seed + len(tokens)) % (1 << 62))  # or the first draws would come again
        return {
            "kind": "begin",
            "prompt": tokens,
            "capacity": self.capacity,
            "taps": protocol.pack_taps(self.taps),
            "judged": None if terms is None else protocol.pack_verify(terms),
            "resumed": resumed,
            "eight": self.eight,
        }

    def _asked(self, message: Mapping[str, Any] | None, root: int) -> Any:
        """The answer to a tree over this root, over as many connections as it takes if this target waits.

        message: None for the next token of a stream.
        """
        try:
            if self.cutting and self.cut_after is not None and self.emitted >= self.cut_after and not self.traffic.resumed:
                self.connection.close()
            if message is not None:
                return self.connection.request(message)
            return self._anew(None, root) if root in self.stop_ids else self.connection.receive()  # there a stream ends
        except LinkLost:
            if self.then != "wait":
                raise
        deadline = time.monotonic() + self.connection.patience_s
        while True:
            try:
                self._open()
                answer = self._anew(message, root)
                self.traffic.resumed += 1
                return answer
            except LinkLost:
                if time.monotonic() > deadline:
                    raise
                time.sleep(AGAIN_S)

    def _anew(self, message: Mapping[str, Any] | None, root: int) -> Any:
        """The same from a new beginning. A stream's next token is the first one behind a prompt that ends with the root."""
        if message is None:
            return self.connection.request(self._begin([*self.text, root], again=True)) | {"path": [], "drafted": 0}
        self.connection.request(self._begin(self.text, again=True, resumed=True))
        return self.connection.request(message)

    def _received(self, answer: Any, tokens: Tensor, start: int) -> VerifiedStates:
        """The states in an answer, of these ids at positions from `start` on."""
        count = len(tokens)
        config = self.config
        dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        rows = (config.num_key_value_heads, count, dim)
        kv = iter([self._tensor(part, rows) for part in answer.get("kv", [])])
        hidden = [self._tensor(part, (count, self.hidden_size)) for part in answer.get("hidden", [])]
        none = torch.empty(count, 0, device=self.device, dtype=self.dtype)
        found = VerifiedStates(
            tokens=tokens,
            positions=torch.arange(start, start + count, device=self.device),
            last=self._tensor(answer["last"], (count, self.hidden_size)) if self.taps.last else none,
            logits=none,
            hidden=dict(zip(self.taps.hidden, hidden, strict=True)),
            kv=dict(zip(self.taps.kv, zip(kv, kv, strict=True), strict=True)),
            condensed=tuple(self._tensor(part, (count, *part["s"][1:])) for part in answer.get("condensed", [])),
            token=answer.get("token", 0),
        )
        if self.then == "continue":
            self.kept.append(found)
        return found

    def _tensor(self, packed: protocol.WireTensor, shape: tuple[int, ...]) -> Tensor:
        return protocol.unpack(packed, self.device, shape).to(self.dtype)

    def _logits(self, answer: Any, nodes: int) -> Tensor:
        """[N, V]; ids that the server did not send are -inf."""
        if "ids" not in answer:
            return self._tensor(answer["logits"], (nodes, self.vocab_size))
        ids = torch.tensor(answer["ids"], device=self.device)
        whole = torch.full((nodes, self.vocab_size), -torch.inf, device=self.device, dtype=self.dtype)
        return whole.scatter(1, ids, self._tensor(answer["logits"], tuple(ids.shape)))


def _message(tree: DraftTree) -> dict[str, Any]:
    message: dict[str, Any] = {"kind": "pass", "tokens": tree.tokens.tolist(), "parents": tree.parents.tolist()[1:]}
    if tree.acceptable is not None:
        message["others"] = (~tree.acceptable).nonzero()[:, 0].tolist()
    if tree.q is not None:
        parents = tree.parents[1:].unique()
        drawn = {"ranks": tree.ranks.tolist(), "width": tree.width, "replacement": tree.replacement}
        message["drawn"] = {"nodes": parents.tolist(), "q": protocol.pack(tree.q[parents]), **drawn}
    return message
