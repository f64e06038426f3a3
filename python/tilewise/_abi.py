"""The C ABI of ``include/tilewise/*.h`` in ctypes, with the same names in the same order.

``tests/python/frameworks/test_numpy_abi.py`` compares the structures with the headers.
"""

from __future__ import annotations

import ctypes
import re
from collections.abc import Callable, Sequence
from ctypes import (
    POINTER,
    c_char,
    c_char_p,
    c_float,
    c_int32,
    c_int64,
    c_uint32,
    c_uint64,
    c_void_p,
)
from typing import Any, ClassVar, TypeAlias

ABI_VERSION = 1

OK, INVALID_ARGUMENT, UNSUPPORTED, WORKSPACE_TOO_SMALL, INTERNAL = range(5)
DTYPES = {"float32": 0, "float16": 1, "bfloat16": 2, "float8_e4m3fn": 3}
DTYPE_NAMES = {number: name for name, number in DTYPES.items()}
CPU, CUDA = 0, 1
DEVICE_NAMES = {CPU: "cpu", CUDA: "cuda"}
FORWARD, BACKWARD, JVP, SECOND = range(4)
MASK_RANGES, MASK_BLOCKS = 1, 2
OUT_DEFAULT = 0
OUT_DTYPES = {"float32": 1, "float16": 2, "bfloat16": 3}
MASK_BLOCK = 128  # rows and keys of a block of a mask

_Fields: TypeAlias = Sequence[tuple[str, Any]]


class Tensor(ctypes.Structure):
    _fields_: ClassVar[_Fields] = [
        ("data", c_void_p),
        ("stride_batch", c_int64),
        ("stride_row", c_int64),
        ("stride_head", c_int64),
    ]


TASK = ctypes.CFUNCTYPE(None, c_void_p, c_int64)
PARALLEL_FOR = ctypes.CFUNCTYPE(None, c_void_p, c_int64, TASK, c_void_p)


class Parallel(ctypes.Structure):
    _fields_: ClassVar[_Fields] = [
        ("parallel_for", PARALLEL_FOR),
        ("user", c_void_p),
        ("threads", c_int32),
        ("reserved", c_int32),
    ]


class Mask(ctypes.Structure):
    _fields_: ClassVar[_Fields] = [
        ("struct_size", c_uint32),
        ("kind", c_int32),
        ("batch", c_int64),
        ("heads", c_int64),
        ("rows", c_int64),
        ("keys", c_int64),
        ("first", c_void_p),
        ("entries", c_void_p),
        ("entry_count", c_int64),
        ("bits", c_void_p),
        ("bit_blocks", c_int64),
    ]


class Attention(ctypes.Structure):
    _fields_: ClassVar[_Fields] = [
        ("struct_size", c_uint32),
        ("device", c_int32),
        ("device_index", c_int32),
        ("dtype", c_int32),
        ("stream", c_void_p),
        ("batch", c_int64),
        ("seqlen_q", c_int64),
        ("seqlen_k", c_int64),
        ("heads_q", c_int64),
        ("heads_kv", c_int64),
        ("head_dim", c_int64),
        ("head_dim_v", c_int64),
        ("q", Tensor),
        ("k", Tensor),
        ("v", Tensor),
        ("out", Tensor),
        ("lse", c_void_p),
        ("lse_stride_batch", c_int64),
        ("lse_stride_head", c_int64),
        ("window_left", c_int64),
        ("window_right", c_int64),
        ("scale", c_float),
        ("softcap", c_float),
        ("scale_ptr", c_void_p),
        ("alibi_slopes", c_void_p),
        ("alibi_stride_batch", c_int64),
        ("bias", c_void_p),
        ("bias_stride_batch", c_int64),
        ("bias_stride_head", c_int64),
        ("bias_stride_row", c_int64),
        ("bias_dtype", c_int32),
        ("dropout_p", c_float),
        ("dropout_seed", c_uint64),
        ("dropout_offset", c_uint64),
        ("dropout_state", c_void_p),
        ("sinks", c_void_p),
        ("cu_seqlens_q", c_void_p),
        ("cu_seqlens_k", c_void_p),
        ("seqused_q", c_void_p),
        ("seqused_k", c_void_p),
        ("max_seqlen_q", c_int64),
        ("max_seqlen_k", c_int64),
        ("block_table", c_void_p),
        ("block_table_stride", c_int64),
        ("block_table_width", c_int64),
        ("page_size", c_int64),
        ("pages", c_int64),
        ("kv_batch_idx", c_void_p),
        ("kv_batch", c_int64),
        ("leftpad_k", c_void_p),
        ("num_splits", c_int32),
        ("deterministic", c_int32),
        ("check", c_int32),
        ("tf32", c_int32),
        ("parallel", POINTER(Parallel)),
        ("batch_invariant", c_int32),
        ("kv_float8", c_int32),
        ("k_descale", c_void_p),
        ("v_descale", c_void_p),
        ("k_descale_stride_batch", c_int64),
        ("k_descale_stride_head", c_int64),
        ("v_descale_stride_batch", c_int64),
        ("v_descale_stride_head", c_int64),
        ("lse_low", c_void_p),
        ("diagonal", c_void_p),
        ("row_offset", c_int64),
        ("key_offset", c_int64),
        ("batch_offset", c_int64),
        ("head_offset", c_int64),
        ("heads_q_total", c_int64),
        ("mask", POINTER(Mask)),
        ("out_dtype", c_int32),
        ("reserved", c_int32),
        ("q_descale", c_void_p),
        ("q_descale_stride_batch", c_int64),
        ("q_descale_stride_head", c_int64),
        ("max_logits", c_void_p),
    ]


class Gradients(ctypes.Structure):
    _fields_: ClassVar[_Fields] = [
        ("struct_size", c_uint32),
        ("reserved", c_int32),
        ("dout", Tensor),
        ("dq", Tensor),
        ("dk", Tensor),
        ("dv", Tensor),
        ("dlse", c_void_p),
        ("dlse_stride_batch", c_int64),
        ("dlse_stride_head", c_int64),
        ("dbias", c_void_p),
        ("dbias_stride_batch", c_int64),
        ("dbias_stride_head", c_int64),
        ("dbias_stride_row", c_int64),
        ("dbias_keys", c_int64),
        ("dbias_rows", c_int64),
        ("dsinks", c_void_p),
        ("dscale", c_void_p),
    ]


class Tangents(ctypes.Structure):
    _fields_: ClassVar[_Fields] = [
        ("struct_size", c_uint32),
        ("reserved", c_int32),
        ("q", Tensor),
        ("k", Tensor),
        ("v", Tensor),
        ("out", Tensor),
        ("lse", c_void_p),
        ("lse_stride_batch", c_int64),
        ("lse_stride_head", c_int64),
        ("bias", c_void_p),
        ("bias_stride_batch", c_int64),
        ("bias_stride_head", c_int64),
        ("bias_stride_row", c_int64),
        ("sinks", c_void_p),
        ("scale", c_void_p),
        ("dout", Tensor),
        ("dlse", c_void_p),
        ("dlse_stride_batch", c_int64),
        ("dlse_stride_head", c_int64),
    ]


class PlanInfo(ctypes.Structure):
    _fields_: ClassVar[_Fields] = [
        ("struct_size", c_uint32),
        ("threads", c_int32),
        ("workspace_bytes", c_int64),
        ("splits", c_int64),
        ("tile_q", c_int32),
        ("tile_k", c_int32),
        ("kernel", c_char * 64),
        ("why", c_char * 256),
    ]


class KernelInfo(ctypes.Structure):
    _fields_: ClassVar[_Fields] = [
        ("struct_size", c_uint32),
        ("device", c_int32),
        ("dtype", c_int32),
        ("max_head_dim", c_int32),
        ("forward", c_int32),
        ("backward", c_int32),
        ("available", c_int32),
        ("reserved", c_int32),
        ("name", c_char * 64),
        ("requires_", c_char * 96),
        ("jvp", c_int32),
        ("second", c_int32),
        ("proved", c_int32),
    ]


class GpuInfo(ctypes.Structure):
    _fields_: ClassVar[_Fields] = [
        ("struct_size", c_uint32),
        ("sm", c_int32),
        ("multiprocessors", c_int32),
        ("shared_bytes", c_int32),
        ("l2_bytes", c_int32),
        ("table", c_int32),
        ("tensor_cores", c_int32),
        ("plain_cores", c_int32),
        ("memory_bytes", c_int64),
        ("name", c_char * 128),
    ]


class Proof(ctypes.Structure):
    _fields_: ClassVar[_Fields] = [
        ("struct_size", c_uint32),
        ("sm", c_int32),
        ("driver", c_int32),
        ("head_dims_count", c_int32),
        ("head_dims", POINTER(c_int32)),
        ("gpu_name", c_char_p),
        ("family", c_char_p),
    ]


class CudaCodeInfo(ctypes.Structure):
    _fields_: ClassVar[_Fields] = [
        ("struct_size", c_uint32),
        ("table", c_int32),
        ("sm", c_int32),
        ("ptx", c_int32),
    ]


class IndexFault(ctypes.Structure):
    _fields_: ClassVar[_Fields] = [
        ("struct_size", c_uint32),
        ("found", c_int32),
        ("index", c_int64),
        ("entry", c_int64),
        ("value", c_int64),
        ("allowed", c_int64),
        ("array", c_char * 32),
        ("sentence", c_char * 256),
    ]


def declare(library: ctypes.CDLL) -> None:
    """Sets the argument and result types of the functions of the loaded library."""
    signatures: dict[str, tuple[Any, list[Any]]] = {
        "plan": (c_int32, [POINTER(Attention), POINTER(Gradients), c_int32, POINTER(PlanInfo)]),
        "forward": (c_int32, [POINTER(Attention), c_void_p, c_int64]),
        "backward": (c_int32, [POINTER(Attention), POINTER(Gradients), c_void_p, c_int64]),
        "plan_tangents": (
            c_int32,
            [
                POINTER(Attention),
                POINTER(Tangents),
                POINTER(Gradients),
                c_int32,
                POINTER(PlanInfo),
            ],
        ),
        "jvp": (c_int32, [POINTER(Attention), POINTER(Tangents), c_void_p, c_int64]),
        "second": (
            c_int32,
            [POINTER(Attention), POINTER(Tangents), POINTER(Gradients), c_void_p, c_int64],
        ),
        "version": (c_char_p, []),
        "abi_version": (c_uint32, []),
        "last_error": (c_char_p, []),
        "cpu_isa": (c_char_p, [c_int32, POINTER(c_int32)]),
        "current_cpu": (c_char_p, []),
        "select_cpu": (c_int32, [c_char_p]),
        "cpu_threads": (c_int32, []),
        "kernel": (c_int32, [c_int32, POINTER(KernelInfo)]),
        "gpu": (c_int32, [c_int32, POINTER(GpuInfo)]),
        "set_proof": (c_int32, [POINTER(Proof)]),
        "cuda_code": (c_int32, [c_int32, POINTER(CudaCodeInfo)]),
        "cuda_versions": (None, [POINTER(c_int32), POINTER(c_int32)]),
        "last_index_error": (c_int32, [c_int32, POINTER(IndexFault)]),
    }
    for name, (result, arguments) in signatures.items():
        function = getattr(library, f"tilewise_{name}", None)
        if function is None:  # an older build of this ABI lacks it; only calling it is an error
            setattr(library, f"tilewise_{name}", _missing(library._name, f"tilewise_{name}"))
            continue
        function.restype = result
        function.argtypes = arguments


def _missing(path: str, name: str) -> Callable[..., None]:
    def function(*_: object) -> None:
        raise ImportError(
            f"{path} has no {name}: it is from an older version of tilewise than these Python files"
        )

    return function


def sized(structure: type[ctypes.Structure]) -> Any:
    """A new structure in which every field except ``struct_size`` is zero."""
    result = structure()
    result.struct_size = ctypes.sizeof(structure)
    return result


def in_python(sentence: str) -> str:
    """A sentence of the library without the fields of its structs that hold strides."""
    stride = r"\b(\w+)[._]stride_(batch|row|head)\b"
    return re.sub(stride, r"the \2 stride of \1", sentence).replace("of alibi ", "of alibi_slopes ")


def check(library: ctypes.CDLL, status: int) -> None:
    """Returns if the status is OK; otherwise raises an exception with the library's message.

    Raises:
        ValueError: an argument is invalid.
        NotImplementedError: the call is valid, but no kernel of this build can run it here.
        RuntimeError: the call failed for any other reason.
    """
    if status == OK:
        return
    sentence = "tilewise: " + in_python(library.tilewise_last_error().decode())
    if status == INVALID_ARGUMENT:
        raise ValueError(sentence)
    if status == UNSUPPORTED:
        raise NotImplementedError(sentence)
    raise RuntimeError(sentence)
