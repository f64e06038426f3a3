"""The plot of decoding: the committed result as bars, a whole grid as lines."""

from __future__ import annotations

import json
import sys

import pytest

from paths import ROOT

sys.path.insert(0, str(ROOT / "bench"))

import plot_decode
from tilewise.cli import plot

COMMITTED = ROOT / "docs" / "results" / "bench-h200-decode.json"
PNG = b"\x89PNG\r\n"


class Axis:
    """Records what is drawn."""

    def __init__(self):
        self.drawn, self.ticks = {}, None

    def barh(self, places, values, *, label, **_style):
        assert len(set(places)) == len(values)
        self.drawn[label] = dict(zip(places, values, strict=True))

    def plot(self, xs, ys, _line, *, label, **_style):
        self.drawn[label] = dict(zip(xs, ys, strict=True))

    def set_yticks(self, places, labels):
        self.ticks = dict(zip(labels, places, strict=True))

    def set_xticks(self, places, labels):
        self.ticks = dict(zip(labels, places, strict=True))

    def grid(self, *_arguments, **_style): ...
    def set_xscale(self, *_arguments, **_style): ...
    def minorticks_off(self): ...
    def set_ylim(self, **_limits): ...


def grid() -> dict:
    rows = [
        dict(batch=b, keys=n, heads=h, kv_heads=h // 4, bytes=b * n * h,
             gb_s={"lengths": 10.0 * b + n, "cudnn": 9.0 * b + n, "dense": 1.0})
        for h in (32, 16) for b in (1, 2, 8, 64) for n in (512, 4096)
    ]  # fmt: skip
    rows += [rows[0] | {"batch": 128}]
    return {"rows": rows, "machine": {"device": "some GPU"}}


def test_bars_of_the_committed_result():
    rows = json.loads(COMMITTED.read_text())["rows"]
    axis = Axis()
    plot_decode.bars(axis, rows)
    assert set(axis.drawn) == {"Tilewise", "Tilewise, pages of 16", "cuDNN"}
    for row in rows:
        middle = axis.ticks[f"B{row['batch']}, {row['keys'] // 1024}k, "
                            f"{row['heads']}/{row['kv_heads']}"]  # fmt: skip
        near = {title: value for title, points in axis.drawn.items()
                for place, value in points.items() if abs(place - middle) < 0.45}  # fmt: skip
        assert near["Tilewise"] == row["gb_s"]["lengths"]
        assert near["cuDNN"] == row["gb_s"]["cudnn"]


def test_lines_of_a_grid():
    axis = Axis()
    plot_decode.lines(axis, [r for r in grid()["rows"] if r["heads"] == 32])
    assert set(axis.drawn) == {
        f"{name}, B{b}" for name in ("Tilewise", "cuDNN") for b in (1, 8, 64)
    }
    assert axis.drawn["cuDNN, B8"] == {512: 72.0 + 512, 4096: 72.0 + 4096}
    assert axis.ticks == {"512": 512, "4k": 4096}


@pytest.mark.parametrize("whole", [False, True])
def test_plot_is_written(whole, tmp_path):
    pytest.importorskip("matplotlib")
    source = COMMITTED
    if whole:
        source = tmp_path / "grid.json"
        source.write_text(json.dumps(grid()))
    assert plot_decode.main([str(source), str(tmp_path / "x.png")]) == 0
    assert (tmp_path / "x.png").read_bytes().startswith(PNG)


def test_no_plot_without_points_or_matplotlib(tmp_path, capsys, monkeypatch):
    empty = tmp_path / "empty.json"
    empty.write_text(json.dumps({"rows": [], "machine": {"device": "x"}}))
    monkeypatch.setattr(plot, "available", lambda: True)
    assert plot_decode.main([str(empty), str(tmp_path / "x.png")]) == 1
    monkeypatch.setattr(plot, "available", lambda: False)
    assert plot_decode.main([str(COMMITTED), str(tmp_path / "x.png")]) == 1
    printed = capsys.readouterr().out
    assert "no point" in printed and "pip install matplotlib" in printed
    assert not (tmp_path / "x.png").exists()
