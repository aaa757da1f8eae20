"""Answers are written in as many rows as memory has room for: Llama-2-7B's keys and values are 0.5 MB a token."""

from types import SimpleNamespace

import pytest
import torch
from conftest import tiny
from corpora import prompts_of

from specbench.engine.memory import NoRoom, Shape
from specbench.engine.pretrained import config_of
from specbench.training import answer_writer, plan
from specbench.training.answer_writer import Lengths, row_bytes, rows_that_fit, write

LLAMA2 = {
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 32,
    "vocab_size": 32000,
    "max_position_embeddings": 4096,
}


@pytest.fixture
def free(monkeypatch):
    """Set how much is free."""
    return lambda size: monkeypatch.setattr(answer_writer.environment, "free_memory", lambda *_: size)


def test_rows_of_a_large_target_are_capped_by_free_memory(free):
    target = Shape(config_of(LLAMA2, "shape"), torch.float16)
    whole = 2048
    assert row_bytes(target, whole, False) == 2 * 32 * 4096 * 2 * whole  # 1.07 GB
    for gigabytes, rows in ((1000, 128), (60, 44), (9, 6), (1.4, 1)):
        free(int(gigabytes * 1e9))
        assert rows_that_fit(target, 128, whole, False) == rows
        assert rows * row_bytes(target, whole, False) <= answer_writer.CACHE_SHARE * gigabytes * 1e9
    free(int(1e9))
    with pytest.raises(NoRoom, match=r"needs 1.1 GB of cache for a text of 2,048 tokens and meta has 1.0 GB free; lower"):
        rows_that_fit(target, 128, whole, False)


def test_fewer_rows_write_the_same_dialogues(free, monkeypatch):
    target, lengths = tiny(), Lengths(answer=9, whole=30, min_answer=4)
    made, original = [], answer_writer.Rows

    def counted(model, rows, *rest):
        made.append(rows)
        return original(model, rows, *rest)

    monkeypatch.setattr(answer_writer, "Rows", counted)
    free(1 << 40)
    many = {text.index: text.tokens for text in write(target, iter(prompts_of(6)), lengths, 6)}
    free(int(2.5 * row_bytes(target, 30, False) / answer_writer.CACHE_SHARE))
    few = {text.index: text.tokens for text in write(target, iter(prompts_of(6)), lengths, 6)}
    assert made == [6, 2] and few == many and len(few) == 6


def test_the_estimate_of_a_training_counts_the_answers_cache(free):
    target = tiny()
    text = SimpleNamespace(target=target, settings=SimpleNamespace(precision="target", rows=128, text_tokens=64))
    free(1 << 40)
    assert plan._answer_cache(text) == 128 * row_bytes(target, 64, False)
    free(10 * row_bytes(target, 64, False))
    assert plan._answer_cache(text) == 8 * row_bytes(target, 64, False)
