"""MTP: a multi-token prediction module, applied to its own output (arXiv:2412.19437; FastMTP: arXiv:2509.18362).

EAGLE's pairs (f_i, e(t_{i+1})) with a norm on each stream, and a whole decoder layer, input norm included:

    f_hat_{i+1} = Layer(W [norm_f(f_i); norm_e(e(t_{i+1}))]),    p_hat(t_{i+2}) = softmax(LMHead(norm(f_hat_{i+1})))

with the target's frozen embedding and LM head and a final norm of its own. One module drafts all levels: f_hat takes the
place of states not yet known, as in FastMTP (DeepSeek-V3 trains one module a level).

Training: L = sum_k alpha_k CE(t, p_hat^(k)) over n steps with the text's tokens as labels and no loss on states. Step k
reads the predictions of step k - 1, one position on (see `Eagle.aligned`), and alpha_k = beta^k / sum_j beta^j with
beta = 0.6, n = 3 (FastMTP). Gradients flow from a step into the one before it: nothing else teaches a step's output to be
the next one's input.

Deviations and choices: known states are the target's post-norm ones, as the target's head reads them, and a step passes on
its output behind the final norm, so that both are of one kind (published modules differ here). W reads the
embedding first, as EAGLE's does. A query's keys are those of `Eagle.aligned`, as in drafting.
FastMTP fine-tunes a module that was trained with its target; here it is trained from the start, for a frozen target. A
label counts where EAGLE regresses the state before it, if that state's sequence goes on; with a confined vocabulary, where
the label lies in it. No published layout is read.
"""

from typing import Any, NoReturn

from torch import Tensor
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from drafters.distillation import DistillationLoss, HardLabels
from drafters.hass import Hass
from specbench.common.types import Depth, Name, Text, Weight
from specbench.engine.interface import Batch
from specbench.engine.policies import TreePolicy
from specbench.engine.target import Target
from specbench.engine.weights import Checkpoint


class Mtp(Hass):
    """A module of two norms, a projection and a decoder layer, trained over several steps on the text's tokens.

    Args:
        steps: n. beta: weights of the steps are proportional to beta^k.
        noise, bias: as of `Eagle`. eagle: other options of `Hass`; its further terms of the loss are off unless given.
    """

    detached = False
    phased = ("steps", "beta", "noise")
    formats: tuple[str, ...] = ()

    def __init__(
        self,
        name: Name,
        growth: TreePolicy,
        weights: Text | None = None,
        steps: Depth = 3,
        beta: Weight = 0.6,
        noise: Weight = 0.0,
        bias: bool = False,
        **eagle: Any,
    ):
        objective: dict[str, Any] = {"regression": 0.0, "classification": 1.0, "topk_weight": 0.0}
        super().__init__(name, growth, weights, steps, beta, noise=noise, bias=bias, **{**objective, **eagle})

    def build(self, target: Target) -> None:
        super().build(target)
        eps = self._config(target).rms_norm_eps
        for part, name in (
            (self, "token_norm"),
            (self, "state_norm"),
            (self, "last_norm"),
            (self.layer, "input_layernorm"),
        ):
            setattr(part, name, LlamaRMSNorm(target.hidden_size, eps))

    def infer_shape(self, checkpoint: Checkpoint) -> NoReturn:
        raise checkpoint.refuse(f"no published layout is known for {type(self).__name__}")

    def teacher(self, truth: Batch) -> DistillationLoss:
        return HardLabels(truth, self.head)

    def loss(self, batch: Batch) -> dict[str, Tensor]:
        """The weighted mean over steps; other values logged are step 1's, `agreement` that with the text."""
        metrics = super().loss(batch)
        return metrics | {"loss": metrics["loss"] / sum(self.beta**k for k in range(self.steps))}
