"""examples/cascade.py: reading a shared prefix once gives the result of reading it per sequence."""

from __future__ import annotations

import sys

import pytest

from paths import ROOT

torch = pytest.importorskip("torch")
sys.path.insert(0, str(ROOT / "examples"))
import cascade  # noqa: E402
import tilewise  # noqa: E402

SMALL = ["--sequences", "5", "--suffix", "9"]


@pytest.mark.parametrize("page", ["1", "3", "16"])
@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16"])
def test_same_result(page, dtype, capsys):
    more = ["--prefix", "100", "--page-size", page, "--dtype", dtype]
    assert cascade.main([*SMALL, *more]) == 0
    assert "saved" in capsys.readouterr().out


def test_reported_bytes_match_what_the_kernels_read():
    options = cascade.parse([*SMALL, "--prefix", "64", "--page-size", "16"])
    p = cascade.make(options)
    key = 2 * 2 * 64 * 4  # keys and values, 2 heads of 64 floats
    suffixes = int(p.lengths.sum()) - 5 * 64
    assert cascade.bytes_read(p) == ((5 * 64 + suffixes) * key, (64 + suffixes) * key)


def test_wrong_merge_is_detected(monkeypatch, capsys):
    monkeypatch.setattr(tilewise, "merge_states", lambda o, lse, o2, lse2: (o2, lse2))
    assert cascade.main([*SMALL, "--prefix", "64"]) == 1
    assert "NOT the same" in capsys.readouterr().out


def test_options_are_checked(capsys):
    with pytest.raises(SystemExit):
        cascade.main(["--prefix", "3"])
    assert "--prefix is 3, but must be at least a page, 16" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        cascade.main(["--heads", "3"])
    assert "--heads is 3, but must be a multiple of --kv-heads, 2" in capsys.readouterr().err
