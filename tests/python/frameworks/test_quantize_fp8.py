"""``tilewise.quantize_fp8``: its numbers and factors, and attention of what it has rounded."""

from __future__ import annotations

import sys

import pytest

from paths import ROOT

torch = pytest.importorskip("torch")

sys.path.insert(0, str(ROOT / "examples"))
import devices  # noqa: E402
import float8_error  # noqa: E402
import tilewise  # noqa: E402
from tilewise._quantize import rotation  # noqa: E402

FLOAT8 = torch.float8_e4m3fn


def draw(*shape: int, seed: int = 0, dtype=torch.float32):
    return torch.randn(*shape, generator=devices.generator(seed)).to(dtype)


def dequantized(x: tilewise.QuantizedFp8, group: int = 1):
    return x.data.float() * x.descale.repeat_interleave(group, dim=1)[:, None, :, None]


@pytest.mark.tensors
@pytest.mark.parametrize("granularity", ["head", "tensor"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_numbers_and_factors(dtype, granularity):
    x = draw(3, 9, 4, 24, dtype=dtype) * torch.tensor([1.0, 3.0, 0.1, 50.0], dtype=dtype)[:, None]
    got = tilewise.quantize_fp8(x, granularity=granularity)
    assert got.data.dtype == FLOAT8 and got.data.shape == x.shape and got.mean is None
    largest = x.float().abs().amax((1, 3)) if granularity == "head" else x.float().abs().max()
    assert got.descale.shape == ((3, 4) if granularity == "head" else (1, 1))
    assert torch.allclose(got.descale, largest / 448, rtol=1e-6, atol=0)
    error = (dequantized(got) - x.float()).abs()
    finest = got.descale[:, None, :, None] * 2.0**-10  # half the step of the smallest numbers
    assert bool((error <= torch.maximum(x.float().abs() * 2.0**-4, finest)).all())
    assert float(got.data.float().abs().max()) == 448.0


@pytest.mark.tensors
@pytest.mark.parametrize("magnitude", [1e-44, 1e-41, 2.0**-126, 1e-36])
def test_numbers_that_are_nearly_zero(magnitude):
    """Their largest divided by 448 is subnormal, or 0: the factor is the least normal number."""
    x = draw(2, 9, 4, 24) * magnitude
    x[:, :, 0, :5] = 0.0
    got = tilewise.quantize_fp8(x)
    least = torch.finfo(torch.float32).tiny
    assert bool((got.descale >= least).all())
    finest = got.descale[:, None, :, None].double() * 2.0**-10
    error = (got.data.double() * got.descale[:, None, :, None].double() - x.double()).abs()
    assert bool((error <= torch.maximum(x.double().abs() * 2.0**-4, finest)).all())


@pytest.mark.tensors
def test_means_of_no_rows_and_of_the_largest_numbers():
    empty = tilewise.quantize_fp8(torch.zeros(2, 0, 3, 8), smooth=True, rotate=True)
    assert empty.data.shape == (2, 0, 3, 8) and bool((empty.descale == 1.0).all())
    assert empty.mean.shape == (2, 1, 3, 8) and not empty.mean.any()
    largest = torch.full((1, 9, 2, 8), 3e38)
    got = tilewise.quantize_fp8(largest, smooth=True)
    assert torch.allclose(got.mean, largest[:, :1]) and bool(got.data.float().isfinite().all())


@pytest.mark.tensors
def test_autocast_changes_nothing():
    x = draw(2, 5, 6, 16)
    want = tilewise.quantize_fp8(x, smooth=True, rotate=True)
    with torch.autocast(x.device.type, dtype=torch.bfloat16):
        got = tilewise.quantize_fp8(x, smooth=True, rotate=True)
    for a, b in zip(got, want, strict=True):
        assert a.dtype == b.dtype and torch.equal(a.float(), b.float())


@pytest.mark.tensors
def test_query_heads_share_the_factor_of_their_keys():
    x = draw(2, 5, 6, 8)
    got = tilewise.quantize_fp8(x, heads_kv=2)
    want = x.abs().amax((1, 3)).unflatten(1, (2, 3)).amax(2) / 448
    assert got.descale.shape == (2, 2) and torch.allclose(got.descale, want, rtol=1e-6, atol=0)
    assert float((dequantized(got, group=3) - x).norm() / x.norm()) < 0.04


@pytest.mark.tensors
def test_layouts_agree():
    x = draw(2, 5, 6, 8)
    options = dict(heads_kv=3, smooth=True, rotate=True)
    got = tilewise.quantize_fp8(x.transpose(1, 2), layout="bhsd", **options)
    want = tilewise.quantize_fp8(x, **options)
    assert devices.equal(got.data.transpose(1, 2), want.data)
    assert devices.equal(got.descale, want.descale)
    assert devices.equal(got.mean.transpose(1, 2), want.mean)


@pytest.mark.tensors
@pytest.mark.parametrize("size", [1, 2, 64, 128, 256])
def test_the_rotation_is_orthogonal(size):
    matrix = rotation(size, draw(1).device).double()
    assert float((matrix @ matrix.T - torch.eye(size)).abs().max()) < 1e-6
    # Equal numbers do not become one large number.
    assert float((torch.ones(size).double() @ matrix).abs().max()) <= 2**0.5 + 1e-6


@pytest.mark.tensors
def test_smooth_changes_only_lse():
    """The scores of a row are less by scale times q.mean."""
    q, v = (draw(2, 20, 4, 64, seed=s) for s in (0, 1))
    k = draw(2, 20, 2, 64, seed=2) + 3.0
    v = v[:, :, :2]
    smooth = tilewise.quantize_fp8(k, smooth=True)
    assert smooth.mean.shape == (2, 1, 2, 64)
    rounded = dequantized(smooth)
    out, lse = tilewise.attention(q, rounded, v, causal=True, return_lse=True)
    whole = tilewise.attention(q, rounded + smooth.mean, v, causal=True, return_lse=True)
    assert float((out - whole[0]).abs().max()) < 1e-4
    moved = (q.unflatten(2, (2, 2)) * smooth.mean.unsqueeze(3)).sum(-1).flatten(2) * 64**-0.5
    assert float((lse + moved.transpose(1, 2) - whole[1]).abs().max()) < 1e-4


def test_errors_of_outliers_against_double_precision():
    """The table of docs/numerics.md; each option mends the inputs that it is for."""
    errors = {
        name: [float8_error.error(make(), **options) for options in float8_error.OPTIONS.values()]
        for name, make in float8_error.INPUTS.items()
    }
    plain, smooth, rotate, both = errors["normal"]
    assert max(plain, smooth, rotate, both) < 0.045
    plain, smooth, rotate, both = errors["keys with a common offset"]
    assert min(plain, rotate) > 0.4 and max(smooth, both) < 0.045
    plain, smooth, rotate, both = errors["large columns"]
    assert min(plain, smooth) > 0.15 and max(rotate, both) < 0.05
    plain, smooth, rotate, both = errors["rare outliers"]
    assert min(plain, smooth) > 0.05 and max(rotate, both) < 0.05


def test_the_example_prints_the_table_of_the_page(capsys):
    """Up to one unit of the last digit, which depends on the instruction set."""
    float8_error.main()
    lines = capsys.readouterr().out.splitlines()
    page = (ROOT / "docs" / "numerics.md").read_text()
    for name, line in zip(float8_error.INPUTS, lines[2:], strict=True):
        row = next(x for x in page.splitlines() if x.startswith(f"| {name} |"))
        stated = [float(cell) for cell in row.split("|")[2:-1]]
        assert [float(x) for x in line[len(name) :].split()] == pytest.approx(stated, abs=1.1e-3)


@pytest.mark.tensors
def test_zeros_and_empty_tensors():
    got = tilewise.quantize_fp8(torch.zeros(2, 3, 1, 8), smooth=True, rotate=True)
    assert not got.data.float().any() and bool((got.descale == 1.0).all())
    none = tilewise.quantize_fp8(torch.zeros(2, 0, 4, 8), heads_kv=2)
    assert none.data.shape == (2, 0, 4, 8) and none.descale.tolist() == [[1.0, 1.0]] * 2


@pytest.mark.tensors
def test_it_can_be_compiled():
    x = draw(2, 5, 4, 16)
    call = lambda x: tilewise.quantize_fp8(x, heads_kv=2, smooth=True, rotate=True)  # noqa: E731
    got, want = torch.compile(call, backend="eager", fullgraph=True)(x), call(x)
    assert devices.equal(got.data, want.data)
    assert devices.equal(got.descale, want.descale)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (dict(x=[1.0]), "x is a list, but must be a torch.Tensor"),
        (dict(x=torch.zeros(1, 2, 3, 8).double()), "x has dtype torch.float64, but must be"),
        (dict(x=torch.zeros(2, 3, 8)), r"x has shape \[2, 3, 8\], but must have 4 dimensions"),
        (dict(granularity="block"), "granularity is 'block', but must be 'head' or 'tensor'"),
        (dict(x=torch.zeros(1, 2, 0, 8)), r"x has shape \[1, 2, 0, 8\], but must have at"),
        (dict(x=torch.zeros(1, 2, 3, 0), rotate=True), "but must have at least one head and one"),
        (dict(heads_kv=2), "heads_kv is 2, but must divide the 3 heads of x"),
        (dict(heads_kv=0), "heads_kv is 0, but must be >= 1"),
        (dict(rotate=True, x=torch.zeros(1, 2, 3, 24)), "x has head dimension 24, but rotate=True"),
        (dict(smooth=2), "smooth is 2, but must be True or False"),
        (dict(layout="sbhd"), "layout is 'sbhd', but must be 'bshd' or 'bhsd'"),
    ],
)
def test_refused_by_name(change, words):
    given = dict(x=torch.zeros(1, 2, 3, 8)) | change
    with pytest.raises((TypeError, ValueError), match=words):
        tilewise.quantize_fp8(**given)
