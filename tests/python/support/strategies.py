"""Hypothesis strategies for random problems that combine every option with every other."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import strategies as st

from cases import GRADIENTS, Case

# Lengths around the edges of plausible tiles, and everything between.
LENGTHS = st.one_of(
    st.integers(0, 20),
    st.integers(0, 150),
    st.sampled_from([1, 1, 15, 16, 17, 31, 32, 33, 63, 64, 65, 127, 128, 129, 255, 256, 257]),
)
HEAD_DIMS = st.one_of(
    st.sampled_from([8, 16, 32, 40, 64, 64, 72, 80, 96, 128]),
    st.integers(1, 70),
    st.sampled_from([1, 3, 111, 160, 192, 256, 257, 320, 385, 512]),
)
ORDERS = [(0, 1, 2, 3), (0, 1, 2, 3), (0, 2, 1, 3), (2, 0, 1, 3), (1, 0, 2, 3), (2, 1, 0, 3)]


def rarely(strategy: st.SearchStrategy, default: object = None) -> st.SearchStrategy:
    return st.one_of(st.just(default), st.just(default), st.just(default), strategy)


def often(strategy: st.SearchStrategy, default: object = None) -> st.SearchStrategy:
    return st.one_of(st.just(default), strategy)


@st.composite
def sizes(draw: st.DrawFn, limit: float) -> dict:
    """Lengths and heads, with the work bounded so that an example takes milliseconds."""
    batch = draw(st.sampled_from([1, 1, 2, 2, 3, 4, 0]))
    varlen_q, varlen_k = draw(
        st.sampled_from([(False, False)] * 3 + [(True, True)] * 2 + [(True, False), (False, True)])
    )
    page_size = draw(rarely(st.sampled_from([1, 2, 3, 16, 17, 64, 256]), 0))

    def lengths(varlen: bool) -> tuple[int, ...]:
        if varlen:
            return tuple(draw(LENGTHS) for _ in range(batch))
        return (draw(LENGTHS),) * batch

    rows, keys = lengths(varlen_q), lengths(varlen_k)
    heads_kv, group = draw(st.sampled_from([1, 1, 2, 3])), draw(st.sampled_from([1, 1, 2, 3, 4, 7]))
    head_dim = draw(HEAD_DIMS)
    head_dim_v = draw(often(HEAD_DIMS, head_dim))

    def products() -> float:
        pairs = batch * max([*rows, 1]) * max([*keys, 1]) * heads_kv * group
        return pairs * (head_dim + max(head_dim_v, 64))

    while products() > limit:
        if group * heads_kv > 2:
            group, heads_kv = min(group, 2), 1
        elif max(head_dim, head_dim_v) > 64 and max([*rows, *keys]) > 32:
            head_dim = head_dim_v = 40
        elif max(keys) > 2 * max(rows):
            keys = tuple(n // 2 for n in keys)
        else:
            rows = tuple(n // 2 for n in rows)
    return dict(
        rows=rows, keys=keys, varlen_q=varlen_q, varlen_k=varlen_k, page_size=page_size,
        heads_kv=heads_kv, group=group, head_dim=head_dim, head_dim_v=head_dim_v,
    )  # fmt: skip


@st.composite
def metadata(draw: st.DrawFn, size: dict) -> dict:
    """Lengths in use, padding, tails and cache indices that fit the sizes."""
    rows, keys, page_size = size["rows"], size["keys"], size["page_size"]
    batch = len(rows)
    m: dict = {}
    if page_size and batch and not size["varlen_k"]:
        keys = (-(-max(keys) // page_size) * page_size,) * batch
    if page_size and batch:
        m["share_pages"] = draw(st.booleans())
    if size["varlen_q"]:
        m["tail_q"] = draw(rarely(st.integers(0, 9), 0))
    if size["varlen_k"] and not page_size:
        m["tail_k"] = draw(rarely(st.integers(0, 9), 0))
    if draw(rarely(st.just(True), False)):
        m["used_q"] = tuple(draw(st.integers(0, n)) for n in rows)
    used = keys
    if draw(often(st.just(True), False)) if page_size else draw(rarely(st.just(True), False)):
        used = m["used_k"] = tuple(draw(st.integers(0, n)) for n in keys)
    if draw(rarely(st.just(True), False)):
        m["leftpad"] = tuple(draw(st.integers(0, n)) for n in used)
    if not page_size and not size["varlen_k"] and draw(rarely(st.just(True), False)):
        m["kv_idx"] = tuple(draw(st.integers(0, batch)) for _ in rows)
    return m


@st.composite
def cases(draw: st.DrawFn, dtype: str, *, dropout: bool = True, small: bool = False) -> Case:
    """Any problem that the library must solve; `small` ones are for the emulator."""
    size = draw(sizes(1e6 if small else 1.2e7))
    meta = draw(metadata(size))
    wide = max([*size["rows"], *size["keys"], 1])
    window = draw(
        st.one_of(
            st.sampled_from([(-1, -1), (-1, 0), (-1, 0)]),
            st.tuples(st.integers(-1, wide), st.integers(-1, wide)),
            st.tuples(st.integers(0, 40), st.integers(0, 40)),
        )
    )
    # Among a million scores of normal q and k some exceed 5, and adding 100 products up to that
    # rounds by more than 1e-6 in any fp32 implementation: hence scores of half the size there.
    # Large scores have their own tests, with numbers that are exact in fp32.
    times = draw(rarely(st.sampled_from([0.3, 1.5, -1.0, 0.0])))
    score = dict(
        window=window,
        scale=None if times is None else times * size["head_dim"] ** -0.5,
        scale_ptr=draw(rarely(st.just(True), False)),
        softcap=draw(rarely(st.sampled_from([0.5, 5.0, 30.0]), 0.0)),
        alibi=draw(rarely(st.sampled_from(["h", "bh"]), "")),
        bias=draw(rarely(st.sampled_from(["", "b", "h", "r", "bh", "br", "hr", "bhr"]))),
        bias_own_dtype=draw(st.booleans()),
        bias_hides=draw(st.booleans()),
        sinks=draw(rarely(st.just(True), False)),
        dropout_p=draw(rarely(st.sampled_from([0.1, 0.5, 0.9]), 0.0)) if dropout else 0.0,
        dropout_state=draw(st.booleans()),
    )
    how = dict(
        splits=draw(rarely(st.integers(1, 7), 0)),
        deterministic=draw(rarely(st.just(True), False)),
        dlse=draw(often(st.just(True), False)),
        wanted=draw(rarely(st.frozensets(st.sampled_from(GRADIENTS)), frozenset(GRADIENTS))),
        order=draw(st.sampled_from(ORDERS)),
        pad=draw(st.sampled_from([0, 0, 1, 3, 8])),
        shift=draw(st.integers(0, 3)),
        expand=draw(rarely(st.sampled_from(["q0", "k0", "v0", "q2", "k2", "v2", "k1", "v1"]), "")),
        spread=0.5 if dtype == "fp32" else 1.0,
        seed=draw(st.integers(0, 2**32 - 1)),
    )
    flat = size["varlen_q"] if how["expand"].startswith("q") else size["varlen_k"]
    if flat and how["expand"].endswith("2"):
        how["expand"] = how["expand"][0] + "1"  # [T, H, D]: heads are dimension 1
    return Case(dtype=dtype, **size, **meta, **score, **how)


@st.composite
def latent(draw: st.DrawFn, dtype: str, *, small: bool = False, largest: int = 576) -> Case:
    """Any problem whose values are the first columns of its keys, in the same memory."""
    case = draw(cases(dtype, small=small))
    dims = [(40, 24), (72, 64), (33, 32), (160, 128), (64, 64), (288, 256), (576, 512), (576, 576)]
    few = [d for d in dims if d[0] <= (largest if not small else 72)]
    head_dim, head_dim_v = draw(st.sampled_from(few))
    # Equal rows of keys have a dq of zero by cancellation, for which a relative bound is void.
    expand = case.expand if case.expand.startswith("q") else ""
    scale = None if case.scale is None else case.scale * (case.head_dim / head_dim) ** 0.5
    return replace(
        case, latent=True, head_dim=head_dim, head_dim_v=head_dim_v, expand=expand, scale=scale
    )


@st.composite
def shards(draw: st.DrawFn, dtype: str, *, small: bool = False) -> Case:
    """Any problem as a shard of a larger one: moved bands, and larger numbers for dropout."""
    case = draw(cases(dtype, small=small))
    wide = max([*case.rows, *case.keys, 1])
    moves = st.integers(-wide, wide)
    if not case.alibi:  # penalties of 2^30 keys need larger bounds
        moves = st.one_of(moves, st.sampled_from([0, 1, -1, 2**31 - 1, -(2**31)]))
    offsets = st.one_of(st.just(0), st.integers(0, 100), st.sampled_from([16, 4096, 2**31 - 1]))
    return replace(
        case, diagonal=draw(st.one_of(st.none(), st.tuples(*[moves] * len(case.rows)))),
        row_offset=draw(offsets), key_offset=draw(offsets), batch_offset=draw(st.integers(0, 3)),
        head_offset=draw(st.integers(0, 3)), more_heads=draw(st.integers(0, 3)),
    )  # fmt: skip


@st.composite
def mask_ranges(draw: st.DrawFn, case: Case) -> tuple:
    """Rectangles of each sequence, or of all: some overlap, some lie beyond the sequence."""
    rows, keys = max([*case.rows, 1]), max([*case.keys, 1])

    def part(length: int) -> tuple[int, int]:
        begin, end = sorted((draw(st.integers(0, length)), draw(st.integers(0, length + 9))))
        return draw(st.sampled_from([(begin, end), (begin, end), (0, length), (0, 2**31 - 1)]))

    def rectangle() -> tuple:
        return (*part(rows), *part(keys), draw(st.sampled_from([0, 1, 1, 2, 3])))

    lists = draw(st.sampled_from([1, len(case.rows)]))
    return tuple(
        tuple(rectangle() for _ in range(draw(st.sampled_from([0, 1, 2, 3, 9]))))
        for _ in range(lists)
    )


@st.composite
def masked(draw: st.DrawFn, dtype: str, *, small: bool = False) -> Case:
    """Any problem with a mask of ranges or of blocks."""
    case = draw(cases(dtype, small=small))
    if draw(st.booleans()):
        return replace(case, mask_ranges=draw(mask_ranges(case)))
    return replace(case, mask_blocks=draw(st.sampled_from(["", "b", "h", "bh"])))


@st.composite
def logits_wanted(draw: st.DrawFn, dtype: str, *, small: bool = False) -> Case:
    """Any problem, shard or masked problem whose largest logits are wanted."""
    case = draw(st.one_of(*(kind(dtype, small=small) for kind in (cases, shards, masked))))
    return replace(case, max_logits=True)


@st.composite
def differentiable(draw: st.DrawFn, dtype: str, *, small: bool = False) -> Case:
    """Any problem, shard or masked problem that has tangents: keys and values are not in pages."""
    kinds = st.one_of(*(kind(dtype, small=small) for kind in (cases, shards, masked)))
    case = draw(kinds.filter(lambda c: c.page_size == 0))
    wide = dtype != "fp32" and draw(rarely(st.just(True), False))
    return replace(case, float32_out=wide)


@st.composite
def wide_out(draw: st.DrawFn, dtype: str, *, small: bool = False) -> Case:
    """Any problem, shard or masked problem whose out is float32."""
    case = draw(st.one_of(*(kind(dtype, small=small) for kind in (cases, shards, masked))))
    return replace(case, float32_out=True)
