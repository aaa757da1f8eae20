"""Attention of drafters: blocks of queries over the keys they see give what all keys give, values and gradients."""

import pytest
import torch
import torch.nn.functional as F

from drafters.layers import BLOCK, attend, step_mask, visible_attention

LENGTH = 2 * BLOCK + 37


def inputs(keys):
    torch.manual_seed(0)
    shapes = (2, 4, LENGTH, 8), (2, 2, keys, 8), (2, 2, keys, 8)
    return [torch.randn(shape, requires_grad=True) for shape in shapes]


def masks():
    causal = torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril()
    two = torch.stack([causal, causal.logical_and(torch.arange(LENGTH) >= LENGTH // 2) | torch.eye(LENGTH).bool()])
    return {"third pass": step_mask(3, LENGTH)[None, None], "another mask a row": two[:, None]}


@pytest.mark.parametrize("name", masks())
def test_blocks_of_queries_give_what_all_keys_give(name, monkeypatch):
    mask = masks()[name]
    q, k, v = inputs(mask.shape[-1])
    calls = []
    whole = F.scaled_dot_product_attention

    def counted(q, k, *rest, **options):
        calls.append(q.shape[2] * k.shape[2])
        return whole(q, k, *rest, **options)

    expected = whole(q, k, v, mask, enable_gqa=True)
    slope = torch.randn_like(expected)
    gradients = torch.autograd.grad(expected, (q, k, v), slope)
    monkeypatch.setattr(F, "scaled_dot_product_attention", counted)
    found = visible_attention(q, k, v, mask)
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
    for ours, theirs in zip(torch.autograd.grad(found, (q, k, v), slope), gradients, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-5)
    assert sum(calls) < 0.85 * q.shape[2] * k.shape[2], "keys that nobody sees were multiplied"


def test_a_query_without_a_key_gets_nothing():
    mask = torch.ones(1, LENGTH, LENGTH, dtype=torch.bool).tril(-1)
    q, k, v = inputs(LENGTH)
    found = attend(q, k, v, mask)
    assert (found[:, 0] == 0).all() and (found[:, 1:] != 0).any(-1).all()
    torch.testing.assert_close(found[:, 1], v[:, :, 0].repeat_interleave(2, 1).flatten(1))


def test_a_gpus_fast_kernels_are_not_refused_shared_key_heads_beside_a_mask(monkeypatch):
    """They take one of the two; shapes alone tell, so a device without values will do."""
    heads = []

    def counted(q, k, v, *rest, **options):
        heads.append((k.shape[1], v.shape[1]))
        return q

    monkeypatch.setattr(F, "scaled_dot_product_attention", counted)
    q, k, v = (x.to("meta") for x in inputs(LENGTH))
    for mask in (torch.ones(1, 1, LENGTH, LENGTH, dtype=torch.bool, device="meta"), None):
        visible_attention(q, k, v, mask)
    assert heads == [(4, 4), (2, 2)]
