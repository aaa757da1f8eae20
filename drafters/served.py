"""Another engine's answers beside this one's: an OpenAI-compatible server, such as vLLM or SGLang with an exported drafter.

It drafts nothing here: the loop is not run, and seconds are those of its own machine.
"""

import hashlib
import json
from typing import Any, Literal

from specbench.common.errors import SpecBenchError
from specbench.common.types import Duration, Name, Text
from specbench.engine.decode import Limits
from specbench.engine.drafter import ServedEngine
from specbench.engine.interface import Taps
from specbench.engine.sampling import Sampler
from specbench.remote.endpoint import Answer, Endpoint

MODEL_KEYS = ("id", "root", "owned_by", "max_model_len")  # of a server's description that are kept


class Served(ServedEngine):
    """An endpoint as an arm.

    Args:
        endpoint: its address.
        model: as the server calls it; None: the only one that it has.
        engine: what runs there, in free text, which is part of its rows' identity.
        prompts: sent as ids, or as text to servers that take no ids.
        timeout_s: see `Endpoint.timeout_s`.

    Attributes:
        contents: a digest of the server's description of its model, part of its rows' identity.
    """

    taps = Taps(last=False)

    def __init__(
        self,
        name: Name,
        endpoint: Text | None,
        model: Text | None = None,
        engine: Text | None = None,
        prompts: Literal["ids", "text"] = "ids",
        timeout_s: Duration = 60.0,
    ):
        if endpoint is None:
            raise SpecBenchError(f"drafter={name} needs endpoint=http://HOST:PORT of a server that runs")
        super().__init__(name)
        self.model, self.engine, self.prompts = model, engine, prompts
        self.endpoint = Endpoint(endpoint, timeout_s)
        self.found: dict[str, Any] = {}

    def find_model(self) -> None:
        served = {model["id"]: model for model in self.endpoint.models()}
        if self.model is None and len(served) != 1:
            raise SpecBenchError(f"endpoint={self.endpoint.url}: it serves {_listed(served)}; choose with drafter.model=")
        name = next(iter(served)) if self.model is None else self.model
        if name not in served:
            raise SpecBenchError(f"drafter.model={name}: {self.endpoint.url} serves {_listed(served)}")
        self.found = {key: served[name][key] for key in MODEL_KEYS if isinstance(served[name].get(key), (str, int))}
        digest = hashlib.sha256(json.dumps(self.found, sort_keys=True).encode()).hexdigest()
        self.contents = {"served": digest}

    def answer(self, prompt: list[int], text: str, limits: Limits, sampler: Sampler, seed: int | None) -> Answer:
        """The server's answer to a prompt, sampled as here: no default of the server's applies."""
        request: dict[str, Any] = {
            "model": self.found["id"],
            "prompt": prompt if self.prompts == "ids" else text,
            "max_tokens": limits.max_new_tokens,
            "temperature": sampler.temperature,
            "top_p": sampler.top_p,
            "top_k": sampler.top_k or -1,
            "repetition_penalty": 1.0,
            "presence_penalty": 0.0,
            "frequency_penalty": 0.0,
            "ignore_eos": False,
            "stop_token_ids": list(limits.stop_ids),
            "return_token_ids": True,
        }
        if self.prompts == "text":
            request["add_special_tokens"] = False  # the text contains them
        return self.endpoint.complete(request if seed is None else {**request, "seed": seed})

    def bind(self, target: Any) -> None:
        if not self.found:
            self.find_model()


def _listed(served: Any) -> str:
    names = ", ".join(sorted(served)[:5])
    return names if served else "no model"
