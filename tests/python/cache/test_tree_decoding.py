"""examples/tree_decoding.py: verifying a tree of guesses generates what plain decoding does."""

from __future__ import annotations

import random
import sys

import pytest

from paths import ROOT

torch = pytest.importorskip("torch")
sys.path.insert(0, str(ROOT / "examples"))
import tree_decoding  # noqa: E402
from tilewise import masks  # noqa: E402


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("shape", [(1, 1, 1), (16, 6, 2), (64, 12, 3)])
def test_same_tokens_in_fewer_calls(seed, shape, capsys):
    rows, depth, width = map(str, shape)
    more = ["--rows", rows, "--depth", depth, "--width", width, "--seed", str(seed)]
    assert tree_decoding.main(["--tokens", "60", *more]) == 0
    calls = int(capsys.readouterr().out.split()[3])
    assert calls == 60 if shape[0] == 1 else calls < 60


def test_wrong_guesses_change_nothing(monkeypatch):
    draws = random.Random(0)

    def guess(text, rows, depth, width):
        parents = [-1] + [draws.randrange(i) for i in range(1, rows)]
        depths = [0]
        for parent in parents[1:]:
            depths.append(depths[parent] + 1)
        tokens = [text[-1], *(draws.randrange(64) for _ in parents[1:])]
        return tree_decoding.Draft(tokens, parents, depths)

    monkeypatch.setattr(tree_decoding, "guess", guess)
    assert tree_decoding.main(["--tokens", "40", "--rows", "20", "--depth", "20"]) == 0


def test_a_draft_that_sees_other_branches_is_detected(monkeypatch, capsys):
    chain = masks.Tree.from_parents
    monkeypatch.setattr(
        masks.Tree,
        "from_parents",
        classmethod(lambda cls, parents: chain(range(-1, len(parents) - 1))),
    )
    assert tree_decoding.main(["--rows", "64", "--width", "3"]) == 1
    assert "DIFFER" in capsys.readouterr().out


def test_guesses_are_what_followed_before():
    draft = tree_decoding.guess([7, 1, 2, 7, 3, 7], rows=16, depth=2, width=2)
    assert draft.tokens == [7, 3, 1, 7, 2]  # 3 followed 7 last
    assert draft.parents == [-1, 0, 0, 1, 2]
    assert draft.depths == [0, 1, 1, 2, 2]
    assert tree_decoding.guess([7, 1, 2, 7, 3, 7], rows=3, depth=2, width=2).tokens == [7, 3, 1]


@pytest.mark.parametrize(
    ("option", "value", "allowed"),
    [("rows", "65", "from 1 to 64"), ("rows", "0", "from 1 to 64"), ("width", "-1", "at least 0")],
)
def test_options_out_of_range_are_refused(option, value, allowed, capsys):
    with pytest.raises(SystemExit):
        tree_decoding.main([f"--{option}", value])
    assert f"--{option} is {value}, but must be {allowed}" in capsys.readouterr().err
