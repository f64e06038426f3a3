"""The ctypes structures match the headers: names, order and types."""

from __future__ import annotations

import ctypes
import re

import pytest

from paths import ROOT
from tilewise import _abi

HEADERS = sorted((ROOT / "include/tilewise").glob("*.h"))
TEXT = "".join(header.read_text() for header in HEADERS)
CODE = re.sub(r"/\*.*?\*/", "", TEXT, flags=re.S)

SCALARS = {
    "uint32_t": ctypes.c_uint32,
    "int32_t": ctypes.c_int32,
    "int64_t": ctypes.c_int64,
    "uint64_t": ctypes.c_uint64,
    "float": ctypes.c_float,
    "tilewise_tensor": _abi.Tensor,
}
STRUCTURES = {
    "tilewise_tensor": _abi.Tensor,
    "tilewise_parallel": _abi.Parallel,
    "tilewise_mask": _abi.Mask,
    "tilewise_attention": _abi.Attention,
    "tilewise_gradients": _abi.Gradients,
    "tilewise_tangents": _abi.Tangents,
    "tilewise_plan_info": _abi.PlanInfo,
    "tilewise_kernel_info": _abi.KernelInfo,
    "tilewise_gpu_info": _abi.GpuInfo,
    "tilewise_cuda_code_info": _abi.CudaCodeInfo,
    "tilewise_index_error": _abi.IndexFault,
    "tilewise_proof": _abi.Proof,
}


def fields_of(name):
    """(name, ctypes type) per field; None for a pointer, whose kind ctypes leaves open."""
    body = re.search(rf"typedef struct {name} \{{(.*?)\}} {name};", CODE, re.S)[1]
    fields = []
    for declaration in filter(None, (part.strip() for part in body.split(";"))):
        function = re.match(r"void \(\*(\w+)\)", declaration)
        array = re.match(r"char (\w+)\[(\d+)\]", declaration)
        if function:
            fields.append((function[1], None))
        elif array:
            fields.append((array[1], ctypes.c_char * int(array[2])))
        else:
            kind, field = re.match(r"(.*?)(\w+)$", declaration, re.S).groups()
            fields.append((field, None if "*" in kind else SCALARS[kind.strip()]))
    return fields


@pytest.mark.parametrize("name", STRUCTURES)
def test_structure_matches_the_headers(name):
    wanted = fields_of(name)
    given = STRUCTURES[name]._fields_
    assert [field for field, _ in given] == [field for field, _ in wanted]
    for (field, kind), (_, expected) in zip(given, wanted, strict=True):
        if expected is None:
            assert ctypes.sizeof(kind) == ctypes.sizeof(ctypes.c_void_p), field
            assert kind not in SCALARS.values(), field
        else:
            assert kind is expected, field


@pytest.mark.parametrize(
    ("prefix", "numbers"),
    [
        ("TILEWISE_", {"FLOAT32": 0, "FLOAT16": 1, "BFLOAT16": 2, "FLOAT8_E4M3": 3}),
        ("TILEWISE_", {"CPU": _abi.CPU, "CUDA": _abi.CUDA}),
        ("TILEWISE_MASK_", {"RANGES": _abi.MASK_RANGES, "BLOCKS": _abi.MASK_BLOCKS}),
        ("TILEWISE_PASS_", {"FORWARD": _abi.FORWARD, "BACKWARD": _abi.BACKWARD}),
        ("TILEWISE_PASS_", {"JVP": _abi.JVP, "SECOND": _abi.SECOND}),
        ("TILEWISE_", {"OK": _abi.OK, "INVALID_ARGUMENT": _abi.INVALID_ARGUMENT}),
        ("TILEWISE_", {"UNSUPPORTED": _abi.UNSUPPORTED, "INTERNAL": _abi.INTERNAL}),
        ("TILEWISE_", {"WORKSPACE_TOO_SMALL": _abi.WORKSPACE_TOO_SMALL}),
    ],
)
def test_constants_match_the_header(prefix, numbers):
    for name, number in numbers.items():
        assert re.search(rf"\b{prefix}{name} = {number}\b", CODE)


def test_declared_functions_exist():
    from tilewise._library import c_library

    library = c_library()
    assert library.tilewise_abi_version() == _abi.ABI_VERSION
    declared = re.findall(r"\n(?:TILEWISE_API [^(]*?)(tilewise_\w+)\(", CODE)
    assert {"tilewise_forward", "tilewise_backward", "tilewise_plan"} <= set(declared)
    for name in declared:
        assert getattr(library, name)
