"""What the target computes for clients: each has a cache of its own, and trees of several can share a pass.

Knows no socket.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from specbench.common.errors import SpecBenchError, one_line
from specbench.engine.batch import forward_together, in_common
from specbench.engine.cache import KVCache
from specbench.engine.interface import DraftTree, Taps, TargetStates
from specbench.engine.slots import Slots
from specbench.engine.target import Target
from specbench.engine.tree import root_only
from specbench.engine.verify import LocalVerifier
from specbench.remote import protocol, requests

NARROW = 8  # nodes of a tree whose pass takes hardly longer than that of one


@dataclass(eq=False)
class Session:
    """A client's generation.

    Attributes:
        target: the server's, with this client's cache and taps. verifier: None before the first prompt.
        int8_states: are its states sent as int8? root: the last verified token.
    """

    target: Target
    verifier: LocalVerifier | None = None
    int8_states: bool = False
    root: int = 0

    @property
    def cache(self) -> KVCache:
        return self.target.cache

    @property
    def over(self) -> bool:
        """Has a stream of plain decoding ended?"""
        return self.root in self.target.stop_ids or self.cache.length >= self.cache.capacity


class Sessions:
    """All clients' generations on one target.

    Args:
        limits: of what a client may request. condensers: drafters that condense states, by the digest of their networks.
    """

    def __init__(self, target: Target, limits: protocol.Limits, condensers: dict[str, Any]):
        self.target, self.limits, self.condensers = target, limits, condensers
        self.slots = Slots(target.new_cache(0), 0) if target.shares_passes else None

    def new(self) -> Session:
        row = in_common(self.target, Taps())
        row.cache = self.target.new_cache(0) if self.slots is None else self.slots.take()
        return Session(row)

    def end(self, session: Session) -> None:
        """Free its cache."""
        if self.slots is not None:
            self.slots.give_back(session.cache)
        session.target.cache, session.verifier = self.target.new_cache(0), None

    # Requests -------------------------------------------------------------------------------------------------------------

    def begin(self, session: Session, request: protocol.Begin) -> dict[str, Any]:
        """Read a prompt: the answer without its seconds. Raises `SpecBenchError` for a request that is not valid."""
        prompt, limits = request["prompt"], self.limits
        longest = limits["context" if request["resumed"] else "prompt"]  # a resumed prompt holds what was generated, too
        requests.require("prompt", "tokens", len(prompt), longest)
        requests.require("capacity", "positions", request["capacity"], limits["context"] + limits["nodes"])
        if not len(prompt) < request["capacity"]:
            raise SpecBenchError(f"a prompt of {len(prompt)} tokens has no room in {request['capacity']} positions")
        requests.require_ids(prompt, self.target.vocab_size)
        try:
            session.target.reset(request["capacity"], self._taps(request["taps"]))
        except IndexError as error:
            raise SpecBenchError(one_line(error)) from error
        verify = request["judged"]
        session.int8_states = request["eight"]
        session.verifier = None if verify is None else LocalVerifier(protocol.unpack_verify(verify), self.target.device)
        states = session.target.prefill(torch.tensor(prompt, device=self.target.device))
        answer: dict[str, Any] = {}
        if session.verifier is None:
            answer["logits"] = protocol.pack(states.logits[-1])
        elif not request["resumed"]:
            answer["token"] = session.root = session.verifier.first(states)
        return answer if request["resumed"] else answer | self._states(session, states)

    def _taps(self, message: protocol.TapsMessage) -> Taps:
        taps = protocol.unpack_taps(message)
        requests.require("request", "logits a tree", (taps.observe_top_k or 0) * self.limits["nodes"], protocol.MAX_ITEMS)
        if taps.condensed is None:
            return taps
        if taps.condensed not in self.condensers:
            raise SpecBenchError("this server does not have the network that condenses the client's states")
        return replace(self.condensers[taps.condensed].taps, observe_top_k=taps.observe_top_k)

    def tree(self, session: Session, request: protocol.Pass | None) -> DraftTree:
        """A request's tree; None: the next token of a stream. Raises `SpecBenchError` for one that is not valid."""
        if request is None:
            return root_only(session.root, self.target.device)
        if session.verifier is None:
            raise SpecBenchError("a tree without a prompt; begin a generation first")
        tree = requests.tree(request, self.limits["nodes"], self.target.vocab_size, self.target.device)
        if session.cache.length + len(tree) > session.cache.capacity:
            raise SpecBenchError(f"a tree of {len(tree)} nodes has no room left in {session.cache.capacity} positions")
        return tree

    # Passes ---------------------------------------------------------------------------------------------------------------

    def share_a_pass(self, one: Session, nodes: int, other: Session, others: int) -> bool:
        """Do two trees fit into one pass? What is read must be alike, and filling up to the wider must cost little."""
        if self.slots is None or one.target.taps.hidden != other.target.taps.hidden:
            return False
        narrow, wide = sorted((nodes, others))
        return wide <= max(NARROW, 2 * narrow)

    def forward(self, sessions: Sequence[Session], trees: Sequence[DraftTree]) -> list[TargetStates]:
        """One pass of the target over a tree of each session."""
        if len(sessions) == 1:
            return [sessions[0].target.forward(trees[0])]
        return forward_together([session.target for session in sessions], trees)

    def accept(self, session: Session, tree: DraftTree, states: TargetStates) -> dict[str, Any]:
        """Verify a tree and keep the accepted rows: the answer without its seconds."""
        assert session.verifier is not None
        verified = session.verifier.verify(tree, states)
        kept = verified.rows(self.target.device)
        answer = _observed_logits(states, session.target.taps)
        answer |= self._states(session, states.select(kept))  # before `keep`, which moves the tapped cache rows
        session.target.keep(kept)
        session.root = verified.bonus
        return {"path": verified.path, "drafted": verified.drafted, "token": verified.bonus, **answer}

    def _states(self, session: Session, states: TargetStates) -> dict[str, Any]:
        """The tapped states, as parts of an answer."""
        taps, pack = session.target.taps, partial(protocol.pack, int8=session.int8_states)
        if taps.condensed is not None:
            return {"condensed": [pack(part) for part in self.condensers[taps.condensed].compress_states(states)]}
        parts: dict[str, Any] = {"last": pack(states.last)} if taps.last else {}
        if taps.hidden:
            parts["hidden"] = [pack(states.hidden[i]) for i in taps.hidden]
        if taps.kv:
            parts["kv"] = [pack(part) for i in taps.kv for part in states.kv[i]]
        return parts


def _observed_logits(states: TargetStates, taps: Taps) -> dict[str, Any]:
    """Logits of every node, for drafters that learn from rejected nodes too."""
    if taps.observe_top_k is None:
        return {"logits": protocol.pack(states.logits)}
    if not taps.observe_top_k:
        return {}
    values, ids = states.logits.topk(min(taps.observe_top_k, states.logits.shape[-1]))
    return {"ids": ids.tolist(), "logits": protocol.pack(values)}
