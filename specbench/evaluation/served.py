"""Answers of another engine as rows: its own clock, its own arithmetic, and never an audit.

Such a row has tokens, the time to the first and the time of the others, but no cycles, since nobody saw its passes. Its
answer is held against the baseline's, and how many are alike is said wherever the row is shown; where they part, rounding
there, another precision or another model can be the cause, and nothing here can tell.
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
    engine: Any,  # an `drafter.ServedEngine`
    target: Target,
    chat: Chat,
    prompt: list[int],
    limits: Limits,
    sampler: Sampler,
    seed: int | None,
    reference: Row | None,
) -> None:
    """Fill a row with one answer. reference: the baseline's; compared if nothing is drawn.

    Raises:
        SpecBenchError: the server fails, the prompt leaves no room, or its ids are none of the target's.
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
    ours, theirs = ([t for t in said if t not in limits.stop_ids] for said in (reference.tokens, ids))
    if answer.ids is None:  # texts then, since a text has more than one way into tokens
        row.served.equal = tokenizer.decode(ours, skip_special_tokens=True).strip() == answer.text.strip()
    else:
        row.served.equal = ours == theirs
    if not row.served.equal:
        alike = (i for i, (a, b) in enumerate(zip(ours, theirs, strict=False)) if a != b)
        row.served.at = next(alike, min(len(ours), len(theirs)))
