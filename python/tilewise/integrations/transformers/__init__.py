"""Tilewise as an attention implementation of Hugging Face Transformers 5.

    import tilewise.integrations.transformers

    model = AutoModelForCausalLM.from_pretrained(name, attn_implementation="tilewise")

The import registers an attention function and a mask function under the name "tilewise", with which
models generate and train on CPU and CUDA: causal and bidirectional attention, sliding windows, GQA,
softcap, sinks, padding on either side, packed sequences, dynamic and static caches, continuous
batching. No mask of rows times keys is made for any of these; a custom 4-D mask is applied as it
is. What cannot be computed as asked raises a sentence that says so.

Rows of padding give 0 (eager attention gives numbers there that nobody reads).
"""

from tilewise._requirements import require, require_version

require("tilewise.hf", "torch", "transformers")
require_version("tilewise.hf", "transformers")

from ._attention import attention
from ._masks import create_mask
from ._register import NAME, register

__all__ = ["NAME", "attention", "create_mask", "register"]

register()
