"""Answers of another engine as rows: tokens, prefill and decoding time, but no cycles, since its passes are not visible.

Answers are compared with the baseline's but not audited: a difference can come from rounding, precision or another model.
"""

from typing import Any

from specbench.common.errors import SpecBenchError
from specbench.data.chat import Chat
from specbench.engine.decode import Limits
from specbench.engine.sampling import Sampler
from specbench.engine.target import Target
from specbench.records.rows import Row, Served


def fill(
    row: Row,
    engine: Any,  # a `ServedEngine`, bound
    target: Target,
    chat: Chat,
    prompt: list[int],
    limits: Limits,
    sampler: Sampler,
    seed: int | None,
    reference: Row | None,
) -> None:
    """Fill a row with one answer, which in greedy decoding is compared with `reference`, the baseline's row.

    Raises `SpecBenchError` if the server fails, the prompt leaves no room, or the answer has ids that the target lacks.
    """
    tokenizer = chat.tokenizer
    answer = engine.answer(prompt, tokenizer.decode(prompt), limits.within(len(prompt), target.max_context), sampler, seed)
    ids = answer.ids if answer.ids is not None else tokenizer(answer.text, add_special_tokens=False)["input_ids"]
    if not ids or max(ids) >= target.vocab_size:
        raise SpecBenchError(f"{engine.name}: its answer has other tokens than this model; does it serve the same one?")
    row.tokens, row.prefill_s, row.decode_s = list(ids), answer.first_s, answer.decode_s
    row.served = Served(counted=answer.ids is None)
    if reference is None or not sampler.greedy:
        return
    expected, received = ([t for t in tokens if t not in limits.stop_ids] for tokens in (reference.tokens, ids))
    if answer.ids is None:  # compare texts, since a text can be tokenised in several ways
        row.served.equal = tokenizer.decode(expected, skip_special_tokens=True).strip() == answer.text.strip()
    else:
        row.served.equal = expected == received
    if not row.served.equal:
        differing = (i for i, (a, b) in enumerate(zip(expected, received, strict=False)) if a != b)
        row.served.at = next(differing, min(len(expected), len(received)))
