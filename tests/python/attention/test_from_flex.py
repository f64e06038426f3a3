"""docs/from-flexattention.md: every block of code has the results of FlexAttention, eagerly."""

from __future__ import annotations

import re
import warnings
from pathlib import Path

import pytest
import torch

PAGE = (Path(__file__).resolve().parents[3] / "docs" / "from-flexattention.md").read_text()
BLOCKS = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL).findall(PAGE)


@pytest.fixture(scope="module")
def names() -> dict:
    """The names that the blocks of the page define, in its order, and the results of each."""
    names: dict = {"results": []}
    torch.manual_seed(3)
    for block in BLOCKS:
        names.pop("flex", None), names.pop("ours", None)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # FlexAttention without torch.compile
            exec(block, names)
        names["results"].append((names["flex"], names["ours"]))
    return names


def test_the_page_has_the_documented_examples() -> None:
    assert len(BLOCKS) == 13
    assert all("flex_attention(" in block and "tilewise.attention" in block for block in BLOCKS)


@pytest.mark.parametrize("index", range(len(BLOCKS)))
def test_a_block_has_the_result_of_flex_attention(index: int, names: dict) -> None:
    flex, ours = names["results"][index]
    torch.testing.assert_close(ours, flex, rtol=2e-5, atol=2e-5)
    assert flex.abs().sum() > 0


def test_the_learned_bias_has_the_gradient_of_flex_attention(names: dict) -> None:
    (index,) = (i for i, block in enumerate(BLOCKS) if "table = " in block)
    results = names["results"][index]
    weights = torch.linspace(-1, 1, results[0].numel()).view_as(results[0])
    grads = [torch.autograd.grad((x * weights).sum(), names["table"]) for x in results]
    torch.testing.assert_close(grads[1], grads[0], rtol=1e-4, atol=1e-4)


def test_masks_of_ranges_stay_small(names: dict) -> None:
    for name in ("prefix_mask", "transfusion_mask", "flamingo_mask", "documents"):
        assert len(names[name].entries) <= 6
