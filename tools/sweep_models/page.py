"""The page docs/integrations/models.md, made from the results."""

from __future__ import annotations

import collections
import re
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

By the sources of the integration that they are of: {sources}. Results of others than the present
ones are run again by `make sweep-models SWEEP_FLAGS=--stale`.

{states}

The cases: `plain`; `left`, `right` and `both`, a padded batch of 3 sequences of 11 tokens;
`wide`, 7 sequences of 5 keys, padded; `bf16`; `generate` and `static`, 4 tokens from a left-padded
batch with the default and a static cache; `picture`, one amid the text of each sequence of a
left-padded batch, of models with placeholders for it. Classes of `AutoModel` have all but the
caches, those that generate language all but `both` and `wide`, and heads on a model that is swept
itself (classification, say) `plain`, `left` and `right`. Rows of padding are not
compared. Classes of pictures and text of which only the text was run, since what a picture is to
them is not known here, have "text only" beside their cases.
Where eager attention itself is further than {usable:g} of the largest number from fp64 (a choice
that rounding decides, such as an expert), Tilewise has to be within {same:g} of eager attention.
In bf16 experts are chosen otherwise now and then; where eager is off by more than {choice:g}, the
median row decides. A case that fails is drawn {draws} times, and the largest errors decide.
"""

_MEANINGS = {
    "equal": "In every case Tilewise's function computed the attention that the model asks an "
    "attention function for, and every output is within twice eager's own error (both against "
    "eager attention in fp64), plus {floor} units in the last place of its largest number.",
    "no attention": "The model has no attention module, runs no softmax, and never asks for an "
    "attention function.",
    "refused": "Building or running the model raises this sentence.",
    "failed": "The first case that failed, with the error relative to the largest number, or the "
    "exception.",
    "not built": "No small configuration and no inputs were found with which eager attention "
    "runs. Nothing is known of the class, so that it counts as failing.",
}


def summary(results: Results) -> str:
    """How many classes are in each state."""
    counts = collections.Counter(result["state"] for result in results.classes.values())
    return ", ".join(f"{counts[state]} {state}" for state in STATES)


def page(results: Results, targets: Mapping[str, discover.Target]) -> str:
    """The page; a class without a result is on it as not built."""
    missing = {"state": "not built", "why": "no result yet"}
    all_results = {name: results.classes.get(name, missing) for name in targets}
    counts = collections.Counter(result["state"] for result in all_results.values())
    table = ["| " + " | ".join(STATES) + " |", "|" + "---|" * len(STATES),
             "| " + " | ".join(str(counts[state]) for state in STATES) + " |"]  # fmt: skip
    meanings = [f"* **{state}**: {_MEANINGS[state].format(floor=precision.FLOOR)}"
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
    """How many results there are of each state of the integration's files."""
    counts = collections.Counter(result.get("sources", "unknown") for result in results.values())
    return ", ".join(f"{count} of `{name}`" for name, count in counts.most_common())


def _section(state: str, results: Mapping[str, Result]) -> Iterator[str]:
    chosen = {name: result for name, result in results.items() if result["state"] == state}
    if not chosen:
        yield "None."
    elif state == "no attention":
        yield ", ".join(chosen) + "."
    elif state == "equal":
        yield from _equal(chosen)
    else:
        yield from _by_sentence(chosen)


def _by_sentence(chosen: Mapping[str, Result]) -> Iterator[str]:
    """Classes with the same sentence, but for their own name in it, stand together."""
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
    yield "Errors are the largest of all cases in float32. Attention modules of the model's own"
    yield "code, which no attention implementation reaches, are named.\n"
    yield "| class | cases | Tilewise | eager | own code |"
    yield "|---|---|---|---|---|"
    for name, result in chosen.items():
        measured = {case: value for case, value in result["cases"].items() if "ours" in value}
        single = [value for case, value in measured.items() if case != "bf16"]
        ours, eager = (max(value[key] for value in single) for key in ("ours", "eager"))
        own = ", ".join(result.get("own", ()))
        tried = ", ".join(measured)
        if result.get("pictures") is False:
            tried += ", text only"
        yield f"| {name} | {tried} | {ours:.1e} | {eager:.1e} | {own} |"
