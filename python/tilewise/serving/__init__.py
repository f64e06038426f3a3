"""Continuous batching of language models over a paged key/value cache.

``Engine`` runs a causal language model of Transformers on many requests per forward pass, with keys
and values in the pages of one ``PagePool``. ``Service`` runs an engine in a thread of its own.
docs/serving.md describes the design, and examples/serve.py is an HTTP server.

The package needs torch and transformers.
"""

from tilewise._requirements import require, require_version

require("tilewise.serving", "torch", "transformers")
require_version("tilewise.serving", "transformers")

from .engine import Completion, Engine, OverloadedError
from .pages import PagePool
from .sampling import MAX_LOGPROBS, Logprobs, SamplingParams
from .sequence import Output
from .service import Service, ServiceClosedError

__all__ = [
    "MAX_LOGPROBS",
    "Completion",
    "Engine",
    "Logprobs",
    "Output",
    "OverloadedError",
    "PagePool",
    "SamplingParams",
    "Service",
    "ServiceClosedError",
]
