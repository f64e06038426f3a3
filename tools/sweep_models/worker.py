"""A process that reads class names, one per line, sweeps them and answers in JSON."""

from __future__ import annotations

import json
import os
import resource
import sys
import warnings

MEMORY = 8 << 30  # bytes of address space: stops configurations that were not shrunk


def main() -> None:
    """Runs until the input ends."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # redirects what libraries print to stderr
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
