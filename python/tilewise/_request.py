"""The arguments of attention other than q, k and v, as one value for every backend."""

from __future__ import annotations

from typing import Any, NamedTuple

from ._check import UNBOUNDED, Window


class Shard(NamedTuple):
    """Where the rows, keys, heads and sequences of a call lie in a larger problem.

    The results are those of the larger problem: row i is aligned with key i + seqlen_k - seqlen_q +
    diagonal of this call, and dropout decides as for row row_offset + i, key key_offset + j, and so
    on. The bias, the slopes and all other tensors are those of the shard.
    """

    diagonal: Any = None  # int32 [batch]; None: 0
    row_offset: int = 0
    key_offset: int = 0
    batch_offset: int = 0
    head_offset: int = 0
    heads_q_total: int = 0  # query heads of the larger problem; 0: those of q
    dropout_state: Any = None  # int64 [2], seed and offset, the same for all shards; None: drawn


class Request(NamedTuple):
    """The options of ``tilewise.attention``, unchecked."""

    causal: bool = False
    window: Window = UNBOUNDED
    scale: Any = None
    softcap: float = 0.0
    bias: Any = None
    alibi_slopes: Any = None
    sinks: Any = None
    dropout_p: float = 0.0
    return_lse: bool = False
    deterministic: bool = False
    tf32: bool = False
    check: bool = False
    batch_invariant: bool = False
    k_descale: Any = None
    v_descale: Any = None
    mask: Any = None
    return_max_logits: bool = False
    out_dtype: Any = None
    precise_backward: bool = False
    q_descale: Any = None
    shard: Shard = Shard()

    def arguments(self) -> dict[str, Any]:
        """The options as arguments of the public functions, which take no shard."""
        options = self._asdict()
        del options["shard"]
        return options

    def results(self, out: Any, lse: Any, max_logits: Any) -> Any:
        """What a function with these options returns: out, or a tuple of out and what is asked."""
        asked = ((self.return_lse, lse), (self.return_max_logits, max_logits))
        more = tuple(result for wanted, result in asked if wanted)
        return (out, *more) if more else out


class Sequences(NamedTuple):
    """The arguments that say where the sequences of a variable-length problem lie, unchecked."""

    cu_seqlens_q: Any
    cu_seqlens_k: Any
    max_seqlen_q: int | None = None
    max_seqlen_k: int | None = None
    seqused_q: Any = None
    seqused_k: Any = None
    block_table: Any = None

    def or_none(self) -> Sequences | None:
        """These arguments, or None if none is given: then all sequences are equally long.

        Raises:
            ValueError: another argument is given without cu_seqlens_q.
        """
        given = [name for name, value in self._asdict().items() if value is not None]
        if given and self.cu_seqlens_q is None:
            raise ValueError(f"{given[0]} is given, but belongs to cu_seqlens_q, which is None")
        return self if given else None
