"""DDTree: the best tree of a drafter that drafts all levels at once (arXiv:2604.12989).

Such a drafter gives one distribution a level, whatever stands above. With p_d that of level d, the value of a node is the
product of the probabilities on its path,

    v(u_1 … u_d) = p_1(u_1) … p_d(u_d),

and the tree is the `nodes - 1` nodes of largest value: the expected number of accepted tokens is the sum of v, if p is
right. The authors take them one by one from a heap. Here every level keeps its best `nodes - 1` prefixes and extends those,
which loses no node of the tree, since all ancestors of a node are worth at least as much; nothing is read back to the host.

Medusa's `AccuracyTree` has the same values from accuracies measured once, so that its shape is the same in every cycle.

Deviations and choices: a node has at most `top_k` children (the authors take as many as the tree has nodes).
"""

from typing import Any

import torch
from torch import Tensor

from specbench.common.errors import SpecBenchError
from specbench.common.types import Depth, Nodes, Width
from specbench.engine.policies import Dynamic, Pool, best_children, to_target_ids


class MarginalTree(Dynamic):
    """The nodes of largest value of a drafter with `level_logits`.

    Args:
        depth: levels below the root; no more than the drafter has. top_k: children of a node. nodes: of the target pass,
            root included.
    """

    def __init__(self, depth: Depth, top_k: Width, nodes: Nodes):
        super().__init__(depth, top_k, nodes)
        self.rows = 0  # nothing is expanded

    def limit_depth(self, levels: int) -> None:
        self.depth = min(self.depth, levels)

    def draft(self, drafter: Any) -> Pool:
        """The best candidates of all levels, at most `nodes - 1` of each.

        Raises `SpecBenchError` for a drafter whose levels depend on those above.
        """
        if not (hasattr(drafter, "level_logits") and drafter.parallel):
            raise SpecBenchError(
                "this tree needs the logits of all levels at once, as medusa or dflash has them; choose another tree="
            )
        indices, values = best_children(drafter.level_logits()[: self.depth], self.top_k)  # [K, k]
        ids = to_target_ids(drafter, indices)
        ranks = torch.arange(self.top_k, device=ids.device)
        level = Pool(ids[0], values[0], torch.full_like(ranks, -1), ranks, torch.ones_like(ranks))
        levels, begin = [level], 0  # where the last level begins in the pool
        for depth in range(1, len(ids)):
            begin, level = begin + len(level.tokens), self._extend(level, begin, ids[depth], values[depth])
            levels.append(level)
        return Pool(*(torch.cat(parts) for parts in zip(*levels, strict=True)))

    def _extend(self, above: Pool, begin: int, ids: Tensor, values: Tensor) -> Pool:
        """The best children of a level that begins at `begin` in the pool. ids, values: [k] of every child"""
        product = (above.values[:, None] + values).flatten()
        best = product.topk(min(self.nodes - 1, len(product))).indices
        parents, ranks = best // len(ids), best % len(ids)
        return Pool(ids[ranks], product[best], begin + parents, ranks, above.depths[:1].expand_as(ranks) + 1)
