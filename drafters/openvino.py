"""OpenVINO GenAI beside this engine, on the CPU; its prompt lookup, too. https://github.com/openvinotoolkit/openvino.genai

It reads GGUF in F16, Q8_0 and Q4_1, not in F32. Its cache of prompts is off: a question that is asked again is read again.
"""

import specbench.common.no_telemetry  # noqa: F401

# isort: split
import time
from pathlib import Path
from typing import Any

import numpy as np

from specbench.engine.decode import Limits
from specbench.engine.peer import Peer
from specbench.engine.sampling import Sampler
from specbench.remote.endpoint import Answer

FLOAT32 = {"INFERENCE_PRECISION_HINT": "f32", "KV_CACHE_PRECISION": "f32"}


class OpenVino(Peer):
    """See `Peer`."""

    package, engine = "openvino-genai", "OpenVINO GenAI"

    def open(self, path: Path, threads: int, context: int) -> None:
        import openvino
        import openvino_genai

        self.tensor, self.genai = openvino.Tensor, openvino_genai
        scheduler = openvino_genai.SchedulerConfig()
        scheduler.enable_prefix_caching = False
        options: dict[str, Any] = {"scheduler_config": scheduler, "INFERENCE_NUM_THREADS": threads}
        options |= FLOAT32 if self.arithmetic == "float32" else {}
        options |= {"prompt_lookup": True} if self.lookup else {}
        self.pipeline = openvino_genai.LLMPipeline(str(path), "CPU", **options)

    def answer(self, prompt: list[int], text: str, limits: Limits, sampler: Sampler, seed: int | None) -> Answer:
        ids = np.array([prompt], np.int64)
        inputs = self.genai.TokenizedInputs(self.tensor(ids), self.tensor(np.ones_like(ids)))
        begin = time.perf_counter()
        result = self.pipeline.generate(inputs, self._settings(limits))
        seconds, first_s = time.perf_counter() - begin, result.perf_metrics.get_ttft().mean / 1000
        return Answer(list(result.tokens[0]), first_s=first_s, decode_s=max(0.0, seconds - first_s))

    def _settings(self, limits: Limits) -> Any:
        lookup = {"num_assistant_tokens": self.lookup, "max_ngram_size": self.max_ngram} if self.lookup else {}
        return self.genai.GenerationConfig(
            max_new_tokens=limits.max_new_tokens,
            do_sample=False,
            ignore_eos=not limits.stop_ids,
            stop_token_ids=set(limits.stop_ids),
            **lookup,
        )
