"""llama.cpp beside this engine, by llama-cpp-python, whose prompt lookup it has. https://github.com/abetlen/llama-cpp-python"""

import atexit
import itertools
import time
from pathlib import Path
from typing import Any

from gguf import GGMLQuantizationType

from specbench.engine.decode import Limits
from specbench.engine.peer import Peer
from specbench.engine.sampling import Sampler
from specbench.remote.endpoint import Answer

FLOAT32 = {"type_k": int(GGMLQuantizationType.F32), "type_v": int(GGMLQuantizationType.F32)}  # of the cache


class LlamaCpp(Peer):
    """See `Peer`."""

    package, engine = "llama-cpp-python", "llama.cpp"

    def open(self, path: Path, threads: int, context: int) -> None:
        import llama_cpp
        from llama_cpp.llama_speculative import LlamaPromptLookupDecoding

        options: dict[str, Any] = FLOAT32 if self.arithmetic == "float32" else {}
        if self.lookup:
            # It keeps logits of all tokens to verify drafts; unless asked for them, it has room for those of 512 tokens.
            lookup = LlamaPromptLookupDecoding(self.max_ngram, self.lookup)
            options = {**options, "draft_model": lookup, "logits_all": True}
        self.model = llama_cpp.Llama(
            str(path), n_ctx=context, n_threads=threads, n_threads_batch=threads, verbose=False, **options
        )
        atexit.register(self.model.close)  # which fails once the interpreter has taken its module down

    def answer(self, prompt: list[int], text: str, limits: Limits, sampler: Sampler, seed: int | None) -> Answer:
        answer = Answer()
        self.model.reset()  # or it would not read a prompt that it knows
        begin = time.perf_counter()
        for token in itertools.islice(self.model.generate(prompt, temp=sampler.temperature), limits.max_new_tokens):
            answer.add({"token_ids": [int(token)]}, time.perf_counter() - begin)
            if token in limits.stop_ids:
                break
        return answer
