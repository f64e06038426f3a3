"""One sequence over several processes: context parallelism on ``torch.distributed``.

Each rank of a process group holds some rows of q, k and v and gets the same rows of out. GPUs of
one host copy from each other; other ranks send messages of the group's backend, gloo or NCCL.
docs/distributed.md describes the cut of a sequence, the methods, their cost and their limits.

The package needs torch.
"""

from tilewise._requirements import require

require("tilewise.distributed", "torch")

from .api import attention, attention_varlen, explain
from .cache import attention_with_kvcache
from .choice import Choice
from .layout import positions, shard, unshard

__all__ = [
    "Choice",
    "attention",
    "attention_varlen",
    "attention_with_kvcache",
    "explain",
    "positions",
    "shard",
    "unshard",
]
