"""A process that reads class names, one per line, sweeps them and answers in JSON."""

from __future__ import annotations

import json
import os
import resource
import sys
import warnings
from typing import Any

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
    from . import discover, watch

    watch.count_tilewise()
    targets = discover.targets()
    print("ready", file=answers, flush=True)
    for line in sys.stdin:
        print(json.dumps(result(targets[line.strip()])), file=answers, flush=True)


def result(target: Any) -> dict[str, Any]:
    """The result of a class; an error of the sweep itself, such as an output that it cannot
    compare, is a failure of this class alone.
    """
    from . import build, cases

    try:
        return cases.sweep(target)
    except Exception as error:
        return {"state": "failed", "why": f"the sweep: {build.error_text(error)}"}


if __name__ == "__main__":
    main()
