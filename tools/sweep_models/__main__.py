"""Sweeps the model classes and writes the results and their page.

python -m sweep_models                  every class that has no result yet
python -m sweep_models --fresh          every class
python -m sweep_models --again failed   classes in this state, and those without a result
python -m sweep_models --only LlamaModel BertModel
python -m sweep_models --page           only the page, from the existing results
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from . import discover, page, pool
from .results import Results

ROOT = Path(__file__).resolve().parent.parent.parent


def main() -> int:
    """Returns 0 if every class has a result."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--fresh", action="store_true", help="forget earlier results")
    parser.add_argument(
        "--again", nargs="+", default=(), metavar="STATE", help="also classes in these states"
    )
    parser.add_argument(
        "--stale",
        action="store_true",
        help="also classes whose result is from another version of the integration",
    )
    parser.add_argument("--only", nargs="+", metavar="CLASS")
    parser.add_argument("--mappings", nargs="+", metavar="NAME", help="such as BASE CAUSAL_LM")
    parser.add_argument("--page", action="store_true", help="only write the page")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument(
        "--seconds",
        type=float,
        default=pool.TIME_LIMIT,
        help="limit for one class; a machine that is busy otherwise needs more",
    )
    parser.add_argument("--results", type=Path, default=ROOT / "docs/results/models.json")
    parser.add_argument("--write-page", type=Path, default=ROOT / "docs/integrations/models.md")
    args = parser.parse_args()

    targets = discover.targets()
    results = Results(args.results, fresh=args.fresh)
    results.keep(targets)
    if not args.page:
        stale = set(results.stale() if args.stale else ())
        names = args.only or [
            name
            for name, target in targets.items()
            if (
                name not in results.classes
                or name in stale
                or results.classes[name]["state"] in args.again
            )
            and (not args.mappings or set(args.mappings) & set(target.mappings))
        ]
        unknown = sorted(set(names) - set(targets))
        if unknown:
            parser.error(f"Transformers has no auto-mapping with {', '.join(unknown)}")
        _sweep(names, args.processes, results, args.seconds)
    args.write_page.write_text(page.page(results, targets))
    print(page.summary(results))
    return 0 if len(results.classes) == len(targets) else 1


def _sweep(names: list[str], processes: int, results: Results, limit: float) -> None:
    columns = (
        TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn(),
    )  # fmt: skip
    with Progress(*columns) as progress:
        task = progress.add_task("classes", total=len(names))

        def done(name: str, result: dict[str, object]) -> None:
            results.put(name, result)
            progress.update(task, advance=1, description=f"{name}: {result['state']}"[:60])

        try:
            pool.sweep(names, processes, done, limit)
        finally:
            results.write()


if __name__ == "__main__":
    sys.exit(main())
