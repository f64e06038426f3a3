"""The cases for a model: each is a computation with eager attention and with Tilewise."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from . import build, discover, exceptions, inputs, precision, shrink, watch

GENERATES = {"CAUSAL_LM", "SEQ_TO_SEQ_CAUSAL_LM", "IMAGE_TEXT_TO_TEXT", "MULTIMODAL_LM",
             "SPEECH_SEQ_2_SEQ"}  # fmt: skip
DRAWS = 5  # draws for a case that fails narrowly with the first one
NEW_TOKENS = 4
WIDE = inputs.Sizes(batch=7, length=5, decoder_length=3)  # more sequences than keys


@dataclass(frozen=True)
class Case:
    """A computation ``run(model, inputs)``, and how its inputs are made."""

    name: str
    padding: str | None = None
    sizes: inputs.Sizes | None = None
    dtype: torch.dtype = torch.float32
    pictures: bool = False
    cache: str | None = None  # generate with this cache; "": the default one


def cases(target: discover.Target, built: build.Built) -> Iterator[Case]:
    """The cases of a class: fewer for one that puts a head on another class that is swept
    itself.
    """
    recipe = built.recipe
    is_base = "BASE" in target.mappings
    generates = bool(GENERATES & set(target.mappings))
    yield Case("plain")
    padding = "left" if recipe.is_text else None
    if recipe.is_text:
        yield Case("left", padding="left")
        yield Case("right", padding="right")
        if is_base:
            yield Case("both", padding="both")
            yield Case("wide", padding="left", sizes=WIDE)
    if built.pictures is not None:
        yield Case("picture", padding=padding, pictures=True)
    if is_base or generates:
        yield Case("bf16", padding=padding, dtype=torch.bfloat16)
    if generates and "input_ids" in recipe.names and built.model.can_generate():
        yield Case("generate", padding=padding, cache="")
        yield Case("static", padding=padding, cache="static")


class Trial:
    """A model with eager attention in fp64, and with eager attention and Tilewise in one dtype."""

    def __init__(self, built: build.Built, ours: Any) -> None:
        self.built = built
        self._models = {"eager": built.model, "ours": ours}
        self.models = functools.lru_cache(maxsize=2)(self._of_dtype)

    def _of_dtype(self, dtype: torch.dtype) -> tuple[Any, Any, Any]:
        """Models (reference, eager, Tilewise); the reference has weights rounded to the dtype."""
        eager, ours = self._models["eager"], self._models["ours"]
        if dtype is not torch.float32:
            eager, ours = (copy.deepcopy(model).to(dtype) for model in (eager, ours))
        return copy.deepcopy(eager).double(), eager, ours

    def run(self, case: Case) -> dict[str, Any]:
        """The outcome as it is stored: state, errors and reason."""
        found = self._once(case, 0)
        if isinstance(found, dict):
            return found
        worst = max(found, key=lambda error: error.excess)
        if not worst.passes and not worst.why and worst.ours < 1e3 * worst.limit:
            worst = self._again(case, worst)
        outcome = {"ours": worst.ours, "eager": worst.eager}
        if worst.passes:
            return {"state": "equal", **outcome}
        return {"state": "failed", **outcome, "why": worst.why or
                f"{worst.name}: {worst.ours:.1e} from fp64, allowed {worst.limit:.1e}"}  # fmt: skip

    def _again(self, case: Case, worst: precision.Error) -> precision.Error:
        """The worst output over further draws: the largest errors of each implementation."""
        draws = [worst]
        for seed in range(1, DRAWS):
            more = self._once(case, seed)
            if not isinstance(more, dict):
                draws += [error for error in more if error.name == worst.name]
        ours, eager = max(d.ours for d in draws), max(d.eager for d in draws)
        limit = max(d.limit for d in draws)
        why = next((d.why for d in draws if d.why), "")
        typical = (max(d.typical[0] for d in draws), max(d.typical[1] for d in draws))
        return precision.Error(worst.name, ours, eager, limit, why, typical)

    def _once(self, case: Case, seed: int) -> list[precision.Error] | dict[str, Any]:
        if case.pictures and self.built.pictures is not None:
            made = self.built.pictures.make(seed)
        else:
            made = self.built.recipe.make(seed, case.sizes)
        rows: dict[int | None, Tensor] = {}
        if case.padding is not None:
            made = inputs.padded(made, case.padding, self.built.model.config)
            visible = made["attention_mask"].bool()
            rows[visible.shape[1]] = visible
            name = type(self.built.model).__name__
            if exceptions.POOLS_FIRST.fullmatch(name):
                rows[None] = visible[:, 0]
            if exceptions.APPENDS_TOKEN.fullmatch(name):
                rows[visible.shape[1] + 1] = torch.nn.functional.pad(visible, (0, 1), value=True)
        exact, usual, given = self.models(case.dtype)
        run = functools.partial(_computed, case)
        try:
            eager = run(usual, precision.converted(made, case.dtype))
            with precision.double():
                reference = run(exact, precision.converted(made, torch.float64))
        except Exception as error:
            return {"state": "not possible", "why": f"eager attention: {build.error_text(error)}"}
        watched = watch.Watch()
        try:
            with watched:
                ours = run(given, precision.converted(made, case.dtype))
        except Exception as error:
            return _refusal_or_failure(error)
        if watched.eager or not watched.tilewise:
            return {"state": "failed", "why": f"Tilewise was called {watched.tilewise} times, "
                    f"eager attention {watched.eager} times"}  # fmt: skip
        eps = torch.finfo(case.dtype).eps
        return precision.errors(reference, eager, ours, eps, rows)


def _computed(case: Case, model: Any, made: inputs.Inputs) -> Any:
    if case.cache is None:
        return build.forward(model, made)
    torch.manual_seed(2)
    options: dict[str, Any] = {"cache_implementation": case.cache} if case.cache else {}
    if model.config.is_encoder_decoder:
        options["decoder_start_token_id"] = 1
    with torch.no_grad():
        out = model.generate(
            **made,
            max_new_tokens=NEW_TOKENS,
            min_new_tokens=NEW_TOKENS,
            do_sample=False,
            num_beams=1,
            output_logits=True,
            return_dict_in_generate=True,
            **options,
        )
    return {"logits": torch.stack(out.logits), "tokens": out.sequences.double()}


def _refusal_or_failure(error: Exception) -> dict[str, Any]:
    """Errors that Tilewise itself raises are refusals, all others are failures."""
    import traceback

    frames = traceback.extract_tb(error.__traceback__)
    ours = bool(frames) and "tilewise" in frames[-1].filename.replace("sweep_models", "")
    refused = isinstance(error, ValueError | TypeError | NotImplementedError) and ours
    return {"state": "refused" if refused else "failed", "why": build.error_text(error)}


def sweep(target: discover.Target) -> dict[str, Any]:
    """The result of one class, as it is stored in the file."""
    result: dict[str, Any] = {"mappings": list(target.mappings)}
    try:
        built = build.build(target)
    except Exception as error:
        refusal = build.refusal(target)  # which needs no inputs
        if refusal is not None:
            return {**result, "state": "refused", "why": refusal}
        return {**result, "state": "not built", "why": build.error_text(error)}
    seen = built.seen
    result["size"] = built.level.value
    result["inputs"] = list(built.recipe.names)
    if hasattr(built.model, "get_image_features") and "pixel_values" not in built.recipe.names:
        result["pictures"] = built.pictures is not None
    if seen.own_attention:
        result["own"] = dict(seen.own_attention)
    named = watch.attention_modules(built.model)
    if not seen.eager and not seen.own_attention and not named:
        return {**result, "state": "no attention"}
    try:
        ours = build.like(built.model, "tilewise")
    except ValueError as error:
        # "asks" counts the calls of an attention function, which Tilewise would have served.
        return {**result, "state": "refused", "why": str(error), "asks": seen.eager}
    except Exception as error:
        return {**result, "state": "failed", "why": build.error_text(error)}
    trial = Trial(built, ours)
    result["cases"] = {case.name: trial.run(case) for case in cases(target, built)}
    return {**result, **_verdict(result["cases"])}


def _verdict(outcomes: dict[str, dict[str, Any]]) -> dict[str, str]:
    """The worst outcome decides; cases that eager attention cannot run do not count."""
    for state in ("failed", "refused"):
        for name, outcome in outcomes.items():
            if outcome["state"] == state:
                return {"state": state, "why": f"{name}: {outcome['why']}"}
    if outcomes["plain"]["state"] != "equal":
        return {"state": "not built", "why": outcomes["plain"]["why"]}
    return {"state": "equal"}


Sweep = Callable[[discover.Target], dict[str, Any]]
LEVELS = tuple(level.value for level in shrink.Level)
