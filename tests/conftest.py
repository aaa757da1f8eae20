"""Tiny random targets and every drafter that `conf/drafter/` declares, bound to them; a home folder for the commands."""

import specbench.common.omp_policy

# isort: split
import copy
import gc
import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from battery import COUNT
from hydra import compose, initialize_config_dir
from hydra.utils import instantiate
from omegaconf import OmegaConf
from transformers import (
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
)

import specbench.config.cli  # noqa: F401 - what interpolations mean
from specbench.config.run_spec import RunSpec, from_config
from specbench.engine import weights
from specbench.engine.backends.fused_llama import FusedLlama, like_llama
from specbench.engine.target import Target
from specbench.reporting import freshness

torch.set_num_threads(1)  # tiny tensors are not worth waking another thread; `test_real` takes all

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "results"
# Other engines, which draft nothing here: see `test_served` and `test_peers`.
ENGINES = ("llama_cpp", "openvino", "served")
DRAFTERS = sorted(p.stem for p in (ROOT / "conf" / "drafter").glob("*.yaml") if p.stem not in ENGINES)
DRAFTING = [d for d in DRAFTERS if d != "none"]
BATCHED = [  # that draft for several sequences at once
    "none", "prompt_lookup", "suffix", "rest", "token_recycling", "lookahead", "bigram", "vanilla", "medusa", "medusa2",
    "hydra", "clover2", "eagle1", "eagle2", "hass", "eagle3", "coral", "beagle", "mtp", "moa", "self_speculation",
    "early_exit",
    "dflash",
]  # fmt: skip

SIZES = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "pad_token_id": None,
    "eos_token_id": 60,
}
ARCHITECTURES: dict[str, Any] = {
    "llama": lambda **sizes: LlamaForCausalLM(LlamaConfig(**{**SIZES, **sizes})),
    "qwen2": lambda: Qwen2ForCausalLM(Qwen2Config(**SIZES, tie_word_embeddings=True)),
    "mistral": lambda: MistralForCausalLM(MistralConfig(**SIZES, sliding_window=9)),
    "gemma3": lambda: Gemma3ForCausalLM(
        Gemma3TextConfig(**SIZES, head_dim=8, sliding_window=9, layer_types=["sliding_attention"] * 2 + ["full_attention"])
    ),
}


def tiny(architecture: str = "llama", seed: int = 0, spread: float = 0.4, **sizes: Any) -> Target:
    """A random target whose next-token distribution is neither flat nor a point mass. sizes: of a Llama.

    It has PyTorch's fused forward where runs may have it, for its speed; `optimize_for_inference` takes what runs have.
    """
    torch.manual_seed(seed)
    model = ARCHITECTURES[architecture](**sizes)
    model.config._attn_implementation = "sdpa"
    with torch.no_grad():
        for p in model.parameters():
            if p.ndim == 2:
                p.normal_(0, spread)
    model.generation_config.eos_token_id = None
    target = Target(model)
    if target.window is None and like_llama(target.decoder):
        target.fused = FusedLlama(target.decoder, target.head, target.packing)
    return target


def composed(command: str, *overrides: str) -> Any:
    """A command's configuration. Hydra takes 0.1 s for one, and tests ask for the same few a thousand times."""
    return copy.deepcopy(_composed(command, *overrides))


@cache
def _composed(command: str, *overrides: str) -> Any:
    with initialize_config_dir(str(ROOT / "conf"), version_base="1.3"):
        return compose(command, list(overrides))


def configuration(drafter: str, *overrides: str) -> Any:
    """The run configuration of a drafter."""
    return composed("run", f"drafter={drafter}", *overrides)


def settled(drafter: str, *overrides: str) -> RunSpec:
    """The run of a drafter, checked and settled."""
    return from_config(configuration(drafter, *overrides))


COUNTED = ["bigram", "unigram"]  # fitted by counting
TRAINED = [d for d in DRAFTERS if "weights" in configuration(d).drafter and d not in COUNTED]
# Of the configured drafters those whose weights for the default target lie in the repository.
SHIPPED = [d for d in TRAINED if (ROOT / configuration(d).drafter.weights / "model.safetensors").exists()]


def make(drafter: str, target: Target, *overrides: str, seed: int = 1) -> Any:
    """A drafter as configured, untrained, bound to a target."""
    options = _untrained(drafter, *overrides)
    torch.manual_seed(seed)
    made = instantiate(options)
    made.bind(target)
    if isinstance(made, torch.nn.Module):
        made.eval()
    return made


@cache
def _untrained(drafter: str, *overrides: str) -> Any:
    """A drafter's options without its files, apart from the run's, which take longer to copy than a drafter to make."""
    config = configuration(drafter, "model.name=tiny", *overrides)  # not the default one, whose drafters are narrower
    OmegaConf.resolve(config.drafter)
    part = config.drafter
    while part:
        for files in ("weights", "searched", "corpus"):
            if files in part:
                part[files] = None
        part = part.get("base")
    return OmegaConf.create(OmegaConf.to_container(config.drafter))


@pytest.fixture(params=["llama", "gemma3"])
def target(request: pytest.FixtureRequest) -> Target:
    return tiny(request.param)


def pytest_collection_finish() -> None:
    gc.freeze()  # what was imported is there to stay: collections, which every run of a command begins with, pass over it


def pytest_sessionfinish(session: Any) -> None:
    """A worker of pytest-xdist hands its counts to the process that reports."""
    if hasattr(session.config, "workeroutput"):
        session.config.workeroutput["bad_inputs"] = (COUNT.tried, COUNT.failed)


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    """What a worker handed over; one that died has nothing."""
    tried, failed = getattr(node, "workeroutput", {}).get("bad_inputs", (0, []))
    COUNT.tried += tried
    COUNT.failed += failed


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """How many bad inputs were tried and how many did not end as they should; whether the report waits to be made anew.

    Rows are added at any time, so a report that is older than its rows is said and fails nothing.
    """
    if COUNT.tried:
        terminalreporter.write_line(f"bad inputs: {COUNT.tried} tried, {len(COUNT.failed)} failed")
    try:
        message = freshness.warning(RESULTS)
    except Exception as error:
        message = f"{RESULTS.name}/: {error}"
    if message:
        terminalreporter.write_line(message)


WORDS = ["<pad>", "<end>", *(f"w{i}" for i in range(59))]


@pytest.fixture(scope="session")
def home(tmp_path_factory):
    """A folder with a tiny model, its tokenizer, prompts, training text and weights."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import Whitespace
    from transformers import PreTrainedTokenizerFast

    home = tmp_path_factory.mktemp("home")
    target = tiny()
    target.model.generation_config.eos_token_id = 1
    target.model.save_pretrained(home / "model")
    inner = Tokenizer(WordLevel({w: i for i, w in enumerate(WORDS)}, unk_token="<pad>"))
    inner.pre_tokenizer = Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=inner, unk_token="<pad>").save_pretrained(home / "model")
    prompts = [{"question_id": i, "turns": [f"w{i} w3 w4", "w9 w8"]} for i in range(12)]
    (home / "mtbench.jsonl").write_text("".join(json.dumps(p) + "\n" for p in prompts))
    talk = [
        {
            "id": str(i),
            "conversations": [
                {"from": "human", "value": " ".join(f"w{(i * 7 + j) % 55}" for j in range(6))},
                {"from": "gpt", "value": " ".join(f"w{(i * 3 + j) % 55}" for j in range(20))},
            ],
        }
        for i in range(60)
    ]
    (home / "talk.json").write_text(json.dumps(talk)[:-40])
    for name in ("eagle2", "vanilla"):
        provenance = {"target": "tiny", "target_fingerprint": target.fingerprint()}
        weights.save(make(name, target), home / "weights" / name, provenance)
    return home
