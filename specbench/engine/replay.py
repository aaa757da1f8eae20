"""A target whose greedy answer is known: it stands where `Target` stands in the loop, and runs no pass over trees.

Greedy decoding accepts exactly what the target would have said. Once the baseline has written an answer, one prefill of
prompt and answer yields the states that every later tree pass would compute for the tokens it keeps; what a tree's other
nodes would say can never matter. So real drafting against known states accepts, cycle by cycle, what decoding accepts.
Only where two passes of different shapes round differently can a draft differ: in float32 at a tie. A drafter that learns
from the other nodes (`Drafter.observe_tree`) cannot be replayed: the loop refuses it here, and a cell decodes it instead.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from specbench.engine.interface import DraftTree, Taps, TargetStates
from specbench.engine.target import Target
from specbench.engine.verify import Verifier, VerifyConfig


class ReplayTarget:
    """Greedy decoding of one prompt, replayed for any number of drafters in turn.

    Args:
        target: whose answer it is; its cache holds the whole text from here on, so nothing else may run on it meanwhile,
            or see `detach`.
        prompt, answer: ids; the answer as the baseline emitted it.
        taps: everything that any of the drafters reads.
    """

    replayed = True

    def __init__(self, target: Target, prompt: Sequence[int], answer: Sequence[int], taps: Taps):
        self.target, self.text, self.begin = target, [*prompt, *answer], len(prompt)
        self.device, self.max_context = target.device, target.max_context
        target.reset(len(self.text), taps)
        self.states = target.prefill(torch.tensor(self.text[:-1], device=self.device))  # nothing follows the last token

    def detach(self) -> "ReplayTarget":
        """The same with states of its own: from here on the target may run again."""
        self.states = self.states.select(torch.arange(len(self.states.tokens), device=self.device))
        return self

    def reset(self, capacity: int, taps: Taps | None = None) -> None:
        """Begin again. taps: of the drafter that comes now."""
        self.taps = (taps or Taps()).resolve(self.target.layers)
        self.root = self.begin  # where in the text the root stands

    def verifier(self, terms: VerifyConfig) -> Verifier:
        return self.target.verifier(terms)

    def prefill(self, tokens: Tensor) -> TargetStates:
        """The prompt's states [N, …], and logits [1, V] that say the answer's first token."""
        places = torch.arange(len(tokens), device=self.device)
        return self._states(tokens, places, self.one_hot_logits([self.text[self.begin]]))

    def forward(self, tree: DraftTree) -> TargetStates:
        """What a pass over the tree would say at the nodes that spell the answer; at the others anything."""
        tokens, parents, depths = tree.tokens.tolist(), tree.parents.tolist(), tree.depths.tolist()
        nothing = next(i for i in range(len(tokens) + 1) if i not in tokens)  # behind the answer no draft is right
        spells = [True]
        said = []
        for node, (token, parent, depth) in enumerate(zip(tokens, parents, depths, strict=True)):
            place = self.root + depth
            if node:
                spells.append(spells[parent] and place < len(self.text) and token == self.text[place])
            said.append(self.text[place + 1] if spells[node] and place + 1 < len(self.text) else nothing)
        places = (self.root + tree.depths).clamp(max=len(self.text) - 2)
        return self._states(tree.tokens, places, self.one_hot_logits(said))

    def keep(self, nodes: Tensor) -> None:
        """The root and the accepted path are behind us."""
        self.root += len(nodes)

    def one_hot_logits(self, tokens: list[int]) -> Tensor:
        """Logits [N, V] whose argmax is these ids."""
        logits = torch.zeros(len(tokens), self.target.vocab_size, device=self.device)
        logits[torch.arange(len(tokens), device=self.device), torch.tensor(tokens, device=self.device)] = 1.0
        return logits

    def _states(self, tokens: Tensor, places: Tensor, logits: Tensor) -> TargetStates:
        known = self.states
        return TargetStates(
            tokens=tokens,
            positions=places,
            last=known.last[places],
            logits=logits,
            hidden={i: known.hidden[i][places] for i in self.taps.hidden},
            kv={i: (known.kv[i][0][:, places], known.kv[i][1][:, places]) for i in self.taps.kv},
        )
