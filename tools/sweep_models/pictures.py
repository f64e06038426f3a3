"""Inputs with an image in the text: one placeholder token per feature of the image."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from . import inputs, precision

PLACE = 9  # position of the placeholders in the text, after any left padding


@dataclass
class Pictures:
    """A recipe for text and pixels, with the placeholders of an image among the tokens."""

    recipe: inputs.Recipe
    token: int
    count: int  # placeholders per sequence

    is_text = True

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the inputs."""
        return self.recipe.names

    def make(self, seed: int, sizes: inputs.Sizes | None = None) -> inputs.Inputs:
        """One image per sequence."""
        made = self.recipe.make(seed, sizes)
        ids = made["input_ids"]
        placeholders = ids.new_full((len(ids), self.count), self.token)
        ids = torch.cat([ids[:, :PLACE], placeholders, ids[:, PLACE:]], 1)
        made.update(input_ids=ids, attention_mask=torch.ones_like(ids))
        names = inspect.signature(self.recipe.model.forward).parameters
        for name in ("mm_token_type_ids", "token_type_ids"):
            if name in names:
                made[name] = (ids == self.token).long()
        return made


def candidates(model: Any, names: tuple[str, ...]) -> Iterator[Pictures]:
    """Candidate inputs for this model: those with these names, and images.

    There are none if the model has no placeholders for images.
    """
    token = inputs.find(model.config, "image_token_id", "image_token_index")
    if not hasattr(model, "get_image_features") or not isinstance(token, int):
        return
    if "input_ids" not in names or "pixel_values" in names:
        return
    sizes = "image_sizes" in inspect.signature(model.forward).parameters
    for variant in range(inputs.VARIANTS):
        pixels = ("pixel_values", "image_sizes") if sizes else ("pixel_values",)
        if sizes and variant == inputs.VARIANTS - 1:
            continue  # the patches of this variant have grids instead of image sizes
        recipe = inputs.Recipe(model, (*names, *pixels), variant)
        count = _features(model, recipe)
        if count:
            yield Pictures(recipe, token, count)


def _features(model: Any, recipe: inputs.Recipe) -> int:
    """How many features the model computes from one image; 0 if it does not accept the image."""
    names = inspect.signature(model.get_image_features).parameters
    given = {name: value for name, value in recipe.make(0).items() if name in names}
    try:
        with torch.no_grad():
            out = model.get_image_features(**given)
    except Exception:  # not a valid image for this model
        return 0
    found = getattr(out, "pooler_output", out)
    pieces = [piece for _, piece in precision.tensors(found)]
    return sum(piece.numel() // piece.shape[-1] for piece in pieces) // recipe.sizes.batch
