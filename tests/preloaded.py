"""What the forkserver of `forked` does last, once for all forks; nothing here is measured or replaced by a test."""

import gc

from transformers.conversion_mapping import get_checkpoint_conversion_mapping

get_checkpoint_conversion_mapping("llama")  # compiles hundreds of patterns, whatever the model, and keeps them
gc.freeze()  # a collection in a fork does not visit, hence copy, what was imported before it
