"""Sizes of the drafters whose weights are shipped for the default target, without a tensor of them."""

import json

import pytest
import torch
from conftest import ROOT, SHIPPED, TRAINED, composed, configuration, settled
from hydra.utils import instantiate
from omegaconf import OmegaConf
from transformers import LlamaConfig

from specbench.engine.memory import Shape
from specbench.engine.weights import trained

LARGER = ("dflash", "moa")  # five layers' features, and attention over keys and values of all layers
HEADER = 16_000  # bytes of a safetensors file beside its numbers, at most
TARGET = LlamaConfig(  # SmolLM2-135M
    vocab_size=49152,
    hidden_size=576,
    intermediate_size=1536,
    num_hidden_layers=30,
    num_attention_heads=9,
    num_key_value_heads=3,
    head_dim=64,
    tie_word_embeddings=True,
    rope_parameters={"rope_type": "default", "rope_theta": 100000.0},
)


def built(drafter, *overrides):
    """As configured for the default target, on the meta device."""
    config = configuration(drafter, *overrides)
    OmegaConf.resolve(config.drafter)
    return on_meta(config.drafter)


def on_meta(options):
    """The network of a drafter's resolved options. They lose their weights."""
    part = options
    while part:
        part["weights"], part = None, part.get("base")
    made = instantiate(options)
    with torch.device("meta"):
        made.build(Shape(TARGET, torch.float32))
    return made


def size(drafter, *overrides):
    """Bytes of its weights in bfloat16."""
    return 2 * sum(tensor.numel() for tensor in trained(built(drafter, *overrides)).values())


@pytest.mark.parametrize("drafter", TRAINED)
def test_the_weights_of_the_default_target_can_be_shipped(drafter):
    assert 0 < size(drafter) + HEADER <= (12e6 if drafter in LARGER else 10e6)


@pytest.mark.parametrize("drafter", SHIPPED)
def test_files_are_as_large_as_that(drafter):
    file = ROOT / configuration(drafter).drafter.weights / "model.safetensors"
    assert 0 < file.stat().st_size - size(drafter) <= HEADER


@pytest.mark.parametrize("drafter", ["clover2", "hydra", "eagle3"])
def test_other_targets_keep_the_authors_widths(drafter):
    made = built(drafter, "model.name=other")
    assert made.intermediate_size is None and size(drafter, "model.name=other") > 12e6
    assert getattr(made, "heads", 4) == {"clover2": 5}.get(drafter, 4)


@pytest.mark.parametrize("drafter", ["medusa", "medusa2", "hydra", "clover2", "dflash"])
def test_weights_of_a_papers_recipe_are_decoded_with_its_network(drafter, tmp_path):
    options = composed("train", f"drafter={drafter}", "train=paper").drafter
    OmegaConf.resolve(options)
    options = OmegaConf.to_container(options)
    (tmp_path / "provenance.json").write_text(json.dumps({"drafter": options}))
    found = settled(drafter, f"drafter.weights={tmp_path}").drafter
    shapes = [{name: tensor.shape for name, tensor in trained(on_meta(o)).items()} for o in (options, dict(found))]
    assert shapes[0] == shapes[1] != {name: tensor.shape for name, tensor in trained(built(drafter)).items()}
    (tmp_path / "provenance.json").write_text("{")
    damaged = settled(drafter, f"drafter.weights={tmp_path}").drafter
    assert damaged == OmegaConf.to_container(configuration(drafter, f"drafter.weights={tmp_path}"), resolve=True)["drafter"]


@pytest.mark.parametrize("drafter", SHIPPED)
def test_shipped_weights_change_no_option(drafter):
    assert settled(drafter).drafter == OmegaConf.to_container(configuration(drafter), resolve=True)["drafter"]
