"""cuDNN's decoding with lengths and pages, which PyTorch does not offer, through cuDNN's own Python
front end (nvidia-cudnn-frontend), on the library that PyTorch has loaded.
"""

from __future__ import annotations

import importlib
import importlib.util
from typing import Any

import torch
from torch import Tensor


def installed() -> bool:
    """Whether the front end is installed."""
    return importlib.util.find_spec("cudnn") is not None


class Decode:
    """A graph of one attention: q [batch, 1, head, column] over caches [batch, key, head, column],
    with `lengths` keys per sequence, or with pages that `table` [batch, page] lists.

    Raises:
        RuntimeError: cuDNN does not support this problem.
    """

    def __init__(self, q: Tensor, cache: Tensor, lengths: Tensor, table: Tensor | None) -> None:
        self.cudnn = importlib.import_module("cudnn")
        self.handle = self.cudnn.create_handle()
        types = self.cudnn.data_type
        self.graph = self.cudnn.pygraph(
            io_data_type=types.BFLOAT16,
            intermediate_data_type=types.FLOAT,
            compute_data_type=types.FLOAT,
            handle=self.handle,
        )
        batch = q.shape[0]
        self.lengths = lengths.view(batch, 1, 1, 1)
        self.one = torch.ones_like(self.lengths)
        self.table = None if table is None else table.view(batch, 1, -1, 1)
        self.q, self.k, self.v = (self._tensor(x.transpose(1, 2)) for x in (q, cache, cache))
        self.counts = self._tensor(self.one), self._tensor(self.lengths)
        options: dict[str, Any] = {}
        if self.table is not None:
            self.pages = self._tensor(self.table), self._tensor(self.table)
            options["paged_attention_k_table"], options["paged_attention_v_table"] = self.pages
            options["paged_attention_max_seq_len_kv"] = self.table.shape[2] * cache.shape[1]
        self.out, _ = self.graph.sdpa(
            name="decode",
            q=self.q,
            k=self.k,
            v=self.v,
            attn_scale=q.shape[-1] ** -0.5,
            use_padding_mask=True,
            seq_len_q=self.counts[0],
            seq_len_kv=self.counts[1],
            generate_stats=False,
            **options,
        )
        like = q.transpose(1, 2)
        self.out.set_output(True).set_dim(list(like.shape)).set_stride(list(like.stride()))
        try:
            self._build()
        except self.cudnn.cudnnGraphNotSupportedError as error:
            raise RuntimeError(str(error)) from error
        bytes_needed = self.graph.get_workspace_size()
        self.workspace = torch.empty(max(1, bytes_needed), device=q.device, dtype=torch.uint8)

    def _build(self) -> None:
        self.graph.validate()
        self.graph.build_operation_graph()
        self.graph.create_execution_plans([self.cudnn.heur_mode.A, self.cudnn.heur_mode.FALLBACK])
        self.graph.check_support()
        self.graph.build_plans()

    def _tensor(self, like: Tensor) -> Any:
        types = {
            torch.bfloat16: self.cudnn.data_type.BFLOAT16,
            torch.int32: self.cudnn.data_type.INT32,
        }
        return self.graph.tensor(
            dim=list(like.shape), stride=list(like.stride()), data_type=types[like.dtype]
        )

    def __call__(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """The output, with the layout of q, on PyTorch's stream."""
        out = torch.empty_like(q)
        self.cudnn.set_stream(self.handle, torch.cuda.current_stream().cuda_stream)
        pointers = {
            self.q: q.data_ptr(),
            self.k: k.data_ptr(),
            self.v: v.data_ptr(),
            self.out: out.data_ptr(),
            self.counts[0]: self.one.data_ptr(),
            self.counts[1]: self.lengths.data_ptr(),
        }
        if self.table is not None:
            pointers |= dict.fromkeys(self.pages, self.table.data_ptr())
        self.graph.execute(pointers, self.workspace.data_ptr(), handle=self.handle)
        return out
