"""What drafters share that draft all levels in one forward: a node's logits depend on its depth alone."""

from torch import Tensor

from drafters.base import TrainedDrafter
from specbench.common.errors import SpecBenchError
from specbench.engine.policies import TreePolicy


class LevelDrafter(TrainedDrafter):
    """A trained drafter of `deepest` levels. A subclass sets them before `super().__init__`, and `levels` in `observe`.

    Attributes:
        levels: [K, V] logits by level, the first below the root.
    """

    parallel = True
    deepest: int
    levels: Tensor

    def set_tree_policy(self, growth: TreePolicy) -> None:
        growth.limit_depth(self.deepest)
        super().set_tree_policy(growth)

    def require_depth(self, option: str) -> None:
        """Raises `SpecBenchError` for a tree with more levels than the drafter. option: what sets their number."""
        if self.growth.depth > self.deepest:
            raise SpecBenchError(f"tree of depth {self.growth.depth}, but {option}; choose a tree= of that depth")

    def level_logits(self) -> Tensor:
        return self.levels

    def root_logits(self) -> Tensor:
        return self.levels[0]

    def expand(self, tokens: Tensor, parent_rows: Tensor, depth: int, visible: Tensor) -> Tensor:
        return self.levels[depth].expand(tokens.shape[0], -1)
