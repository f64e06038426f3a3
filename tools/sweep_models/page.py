"""The page docs/integrations/models.md, made from the results."""

from __future__ import annotations

import collections
import re
import textwrap
from collections.abc import Iterator, Mapping
from typing import Any

from . import cases, discover, precision
from .results import STATES, Results

Result = dict[str, Any]

_HEADING = """\
# Models of Transformers

`make sweep-models` made this page with Transformers {transformers} and torch {torch} on a CPU.
It builds every model class of the auto-mappings, {total} of them, tiny and with random weights,
and compares `attn_implementation="tilewise"` with `"eager"`. The results are in
`docs/results/models.json`.

{table}

{sources}

{states}

The cases are `plain`; `left`, `right` and `both`, a padded batch of 3 sequences of 11 tokens;
`wide`, 7 padded sequences of 5 keys; `bf16`; `generate` and `static`, 4 tokens from a left-padded
batch with the default and with a static cache; and `picture`, a left-padded batch with an image
inside the text of each sequence, for models with placeholders for images. Classes of `AutoModel`
run all cases without a cache, classes that generate language all except `both` and `wide`, and
heads on a model that is swept itself (classification, for example) `plain`, `left` and `right`.
Rows of padding are not compared. "Text only" beside the cases marks classes for images and text
that ran without images, because the sweep cannot build their image inputs.

Where eager attention itself differs from fp64 by more than {usable:g} of the largest number
(rounding decides a choice, such as that of an expert), Tilewise must be within {same:g} of eager
attention.
In bf16, rounding sometimes chooses other experts; where the largest error of eager attention
exceeds {choice:g}, it suffices that the error of the median row is at most twice that of eager
attention. A case that fails narrowly is computed with {draws} sets of random numbers,
and the largest errors of all of them are compared.
"""

_MEANINGS = {
    "equal": "In every case Tilewise computed all attention that the model requests from an "
    "attention function, and the error of every output is at most twice that of eager attention "
    "(both against eager attention in fp64) plus {floor} units in the last place of the output's "
    "largest number.",
    "no attention": "The model has no attention module, runs no softmax, and never requests an "
    "attention function.",
    "refused": "Building or running the model raises the error in the table.",
    "failed": "The table has the first case that failed, with its error relative to the largest "
    "number, or the exception.",
    "not built": "The sweep found no small configuration and inputs with which eager attention "
    "runs. Nothing is known about the class, so it counts as failing.",
}


def summary(results: Results) -> str:
    """The number of classes per state."""
    counts = collections.Counter(result["state"] for result in results.classes.values())
    return ", ".join(f"{counts[state]} {state}" for state in STATES)


def page(results: Results, targets: Mapping[str, discover.Target]) -> str:
    """The page; a class without a result appears as not built."""
    missing = {"state": "not built", "why": "no result yet"}
    all_results = {name: results.classes.get(name, missing) for name in targets}
    counts = collections.Counter(result["state"] for result in all_results.values())
    table = ["| " + " | ".join(STATES) + " |", "|" + "---|" * len(STATES),
             "| " + " | ".join(str(counts[state]) for state in STATES) + " |"]  # fmt: skip
    meanings = [_wrapped(f"* **{state}**: {_MEANINGS[state].format(floor=precision.FLOOR)}", "  ")
                for state in STATES]  # fmt: skip
    text = _HEADING.format(
        **(results.stored or results.versions),
        total=len(targets),
        table="\n".join(table),
        states="\n".join(meanings),
        sources=_sources(results.classes),
        usable=precision.USABLE,
        same=precision.SAME,
        choice=precision.CHOICE,
        draws=cases.DRAWS,
    )
    sections = {state: _section(state, all_results) for state in STATES}
    for state in ("failed", "refused", "not built", "no attention", "equal"):
        text += (
            f"\n## {state.capitalize()}: {counts[state]}\n\n" + "\n".join(sections[state]) + "\n"
        )
    return text


def _sources(results: Mapping[str, Result]) -> str:
    """The number of results per version of the integration's files."""
    counts = collections.Counter(result.get("sources", "unknown") for result in results.values())
    listed = ", ".join(f"`{name}` ({count} results)" for name, count in counts.most_common())
    return (
        _wrapped(
            f"Versions of the integration's sources with which the results were made: {listed}."
        )
        + "\n`make sweep-models SWEEP_FLAGS=--stale` repeats those of versions other than "
        "the present one."
    )


def _wrapped(text: str, indent: str = "") -> str:
    return textwrap.fill(
        text, 100, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False
    )


def _section(state: str, results: Mapping[str, Result]) -> Iterator[str]:
    chosen = {name: result for name, result in results.items() if result["state"] == state}
    if not chosen:
        yield "None."
    elif state == "no attention":
        yield _wrapped(", ".join(chosen) + ".")
    elif state == "equal":
        yield from _equal(chosen)
    else:
        yield from _by_sentence(chosen)


def _by_sentence(chosen: Mapping[str, Result]) -> Iterator[str]:
    """Groups classes whose errors differ only in their own name."""
    groups: dict[str, list[str]] = collections.defaultdict(list)
    for name, result in chosen.items():
        groups[re.sub(rf"^{name}\b", "(The class)", _in_a_cell(result["why"]))].append(name)
    yield "| why | classes |"
    yield "|---|---|"
    for why, names in sorted(groups.items(), key=lambda item: (-len(item[1]), item[0])):
        yield f"| {why} | {', '.join(names)} |"


def _in_a_cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|").replace("<", "&lt;")


def _equal(chosen: Mapping[str, Result]) -> Iterator[str]:
    yield "Errors are the largest of all cases in float32. The last column names attention modules"
    yield "in the model's own code, which no attention implementation reaches.\n"
    yield "| class | cases | Tilewise | eager | own code |"
    yield "|---|---|---|---|---|"
    for name, result in chosen.items():
        measured = {case: value for case, value in result["cases"].items() if "ours" in value}
        single = [value for case, value in measured.items() if case != "bf16"]
        ours, eager = (max(value[key] for value in single) for key in ("ours", "eager"))
        own = ", ".join(result.get("own", ()))
        tried = ", ".join(sorted(measured))  # the order of the file
        if result.get("pictures") is False:
            tried += ", text only"
        yield f"| {name} | {tried} | {ours:.1e} | {eager:.1e} | {own} |"
