"""A process that sweeps the classes whose names it reads, one line each, and answers in JSON."""

from __future__ import annotations

import json
import os
import resource
import sys
import warnings

MEMORY = 8 << 30  # bytes of address space: a configuration that was not shrunk ends here


def main() -> None:
    """Until the input ends."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print goes elsewhere
    os.environ["HF_HUB_OFFLINE"] = "1"
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    import torch
    import transformers

    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    from . import cases, discover, watch

    watch.count_tilewise()
    targets = discover.targets()
    print("ready", file=answers, flush=True)
    for line in sys.stdin:
        print(json.dumps(cases.sweep(targets[line.strip()])), file=answers, flush=True)


if __name__ == "__main__":
    main()
