"""Compiles the simt and common kernels for GPUs that CUDA 13 no longer supports (sm_60, 61, 70).

The CUDA 12.9 compiler comes from PyPI: the wheel nvidia-cuda-nvcc-cu12 has ptxas but no nvcc, and
the front end comes as a library, NVRTC, in nvidia-cuda-nvrtc-cu12. The script prints the registers
and spills of each kernel. It needs no GPU and runs no kernel; it shows only that the kernels
compile for Pascal and Volta.

    python tools/check_pascal.py [--arch 60 61 70] [--packages DIR]
"""

from __future__ import annotations

import argparse
import ctypes
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ["nvidia-cuda-nvrtc-cu12==12.9.86", "nvidia-cuda-nvcc-cu12==12.9.86"]
ELEMENTS = ["F16", "BF16", "F32"]
HEAD_DIMS = [64, 128, 256, 512]  # of src/cuda/simt/instances.h
KERNELS = {
    "forward": ["forward"],
    "backward": ["backward_prepare", "backward_keys", "backward_rows"],
}
COMMON_FILES = ["append", "check", "combine", "dbias", "prepare", "scalar_gradients"]
# The kernels in src/cuda/common that are templates of the element, as kernels.cu instantiates them,
# with their parameter structs. Including the files is enough to compile the other kernels.
COMMON_TEMPLATES = {
    "append<{}>": "AppendParams",
    "combine<{}, SplitRow>": "ForwardParams",
    "combine<{}, ChunkRow>": "ForwardParams",
    "combine_by_warps<{}, SplitRow>": "ForwardParams",
    "combine_by_warps<{}, StreamKRow>": "ForwardParams",
    "dbias<{}>": "DbiasParams",
    "dsinks<{}>": "DsinksParams",
}

# NVRTC has no C++ library and few of the compiler's builtins; this is what the kernels and the host
# functions in their headers use of both.
HEADERS = {
    "cuda_runtime.h": (
        "#define __builtin_huge_valf() __builtin_bit_cast(float, 0x7f800000)\n"
        "#define __builtin_memcpy(to, from, bytes) memcpy(to, from, bytes)\n"
        "#define __builtin_expf(x) expf(x)\n"
        "#define __builtin_fabsf(x) fabsf(x)\n"
        "#define __builtin_logf(x) logf(x)\n"
        "#define __builtin_log(x) log(x)\n"
        "#define __builtin_tanhf(x) tanhf(x)\n"
        "#define __builtin_mul_overflow(a, b, result) (*(result) = (a) * (b), false)\n"
        "#define __builtin_add_overflow(a, b, result) (*(result) = (a) + (b), false)\n"
    ),
    "bit": "",
    "cfloat": "#define FLT_MAX 3.402823466e+38f\n#define FLT_MIN 1.175494351e-38f\n",
    "cstddef": "",
    "stdint.h": (
        "typedef signed char int8_t; typedef short int16_t; typedef int int32_t;"
        "typedef long int64_t; typedef unsigned char uint8_t; typedef unsigned short uint16_t;"
        "typedef unsigned uint32_t; typedef unsigned long uint64_t;"
        "typedef unsigned long uintptr_t;\n"
        "#define INT32_MAX 0x7fffffff\n"
        "#define INT64_MAX 0x7fffffffffffffffL\n"
        "#define INT64_MIN (-INT64_MAX - 1)\n"
    ),
    "cstdint": '#include "stdint.h"\n',
    "numeric": (
        "#pragma once\n"
        "namespace std { constexpr int gcd(int a, int b) { return b == 0 ? a : gcd(b, a % b); } }\n"
    ),
    "type_traits": (
        "#pragma once\n"
        "namespace std {"
        "template <bool b, class T, class U> struct choice { using type = T; };"
        "template <class T, class U> struct choice<false, T, U> { using type = U; };"
        "template <bool b, class T, class U> using conditional_t = typename choice<b, T, U>::type;"
        "template <class T, class U> inline constexpr bool is_same_v = false;"
        "template <class T> inline constexpr bool is_same_v<T, T> = true; }\n"
    ),
    "array": (
        "namespace std { template <class T, int n> struct array { T data[n]; };"
        "template <class T, class... U> array(T, U...) -> array<T, 1 + sizeof...(U)>; }\n"
    ),
}

OPTIONS = ["-std=c++20", "-default-device", "-include=cuda_runtime.h", "-w"]


def install(folder: Path) -> None:
    """Installs the compiler packages into a folder."""
    command = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--upgrade"]
    subprocess.run([*command, "--target", str(folder), *PACKAGES], check=True)
    (folder / "nvidia/cuda_nvcc/bin/ptxas").chmod(0o755)


class Nvrtc:
    """The front end, which compiles to PTX."""

    def __init__(self, folder: Path) -> None:
        libraries = folder / "nvidia/cuda_nvrtc/lib"
        ctypes.CDLL(str(libraries / "libnvrtc-builtins.so.12.9"), ctypes.RTLD_GLOBAL)
        self.library = ctypes.CDLL(str(libraries / "libnvrtc.so.12"))

    def compile(self, source: str, options: list[str]) -> bytes:
        """Returns PTX; on failure raises RuntimeError with the compiler's log."""
        program = ctypes.c_void_p()
        library = self.library
        library.nvrtcCreateProgram(
            ctypes.byref(program), source.encode(), b"kernels.cu", 0, None, None
        )
        encoded = (ctypes.c_char_p * len(options))(*[option.encode() for option in options])
        status = library.nvrtcCompileProgram(program, len(options), encoded)
        if status != 0:
            raise RuntimeError(self.text(program, "ProgramLog").decode())
        return self.text(program, "PTX")

    def text(self, program: ctypes.c_void_p, what: str) -> bytes:
        size = ctypes.c_size_t()
        getattr(self.library, f"nvrtcGet{what}Size")(program, ctypes.byref(size))
        buffer = ctypes.create_string_buffer(size.value)
        getattr(self.library, f"nvrtcGet{what}")(program, buffer)
        return buffer.value


def source_of(file: str, element: str, head_dim: int) -> str:
    """The instances of one file of src/cuda/simt."""
    parameters = "ForwardParams" if file == "forward" else "BackwardParams"
    lines = [f'#include "cuda/simt/{file}.cuh"', "namespace tilewise::cuda::simt {"]
    lines.extend(
        f"template __global__ void {kernel}<Config<{element}, {head_dim}>>"
        f"(TILEWISE_PARAMETER {parameters});"
        for kernel in KERNELS[file]
    )
    return "\n".join([*lines, "}"])


def source_of_common() -> str:
    """All kernels of src/cuda/common."""
    lines = [f'#include "cuda/common/{file}.cuh"' for file in COMMON_FILES]
    lines.append("namespace tilewise::cuda::common {")
    lines.extend(
        f"template __global__ void {kernel.format(element)}(TILEWISE_PARAMETER {parameters});"
        for element in ELEMENTS
        for kernel, parameters in COMMON_TEMPLATES.items()
    )
    return "\n".join([*lines, "}"])


def sources() -> Iterator[tuple[str, str]]:
    """(label, source) of everything to compile."""
    yield "common", source_of_common()
    for element in ELEMENTS:
        for head_dim in HEAD_DIMS:
            for file in KERNELS:
                yield f"{element} {head_dim}", source_of(file, element, head_dim)


def resources(log: str) -> list[tuple[str, int, int]]:
    """(kernel, registers, bytes spilled) from `ptxas -v`."""
    found = []
    for part in log.split("Compiling entry function")[1:]:
        name = re.search(r"(?:simt|common)(\d+)(\w+)", part)
        spilled = re.search(r"(\d+) bytes spill stores", part)
        registers = re.search(r"Used (\d+) registers", part)
        assert name and spilled and registers, part
        kernel = name.group(2)[: int(name.group(1))]
        found.append((kernel, int(registers.group(1)), int(spilled.group(1))))
    return found


def main() -> None:
    """Compile everything and print a line per kernel."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--arch", type=int, nargs="+", default=[60, 61, 70])
    parser.add_argument(
        "--packages", type=Path, help="folder of the compiler packages; installed there if missing"
    )
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = arguments.packages or Path(temporary) / "packages"
        if not (folder / "nvidia/cuda_nvrtc").exists():
            install(folder)
        compiler = Nvrtc(folder)
        headers = Path(temporary) / "headers"
        headers.mkdir()
        for name, text in HEADERS.items():
            (headers / name).write_text(text)
        includes = [f"-I{path}" for path in (headers, ROOT / "src", ROOT / "include")]
        for arch in arguments.arch:
            for label, source in sources():
                ptx = compiler.compile(source, [f"-arch=compute_{arch}", *OPTIONS, *includes])
                at = Path(temporary) / "kernels.ptx"
                at.write_bytes(ptx)
                ptxas = [str(folder / "nvidia/cuda_nvcc/bin/ptxas"), "-v"]
                done = subprocess.run(
                    [*ptxas, f"-arch=sm_{arch}", str(at), "-o", str(at) + ".cubin"],
                    check=True, capture_output=True, text=True,
                )  # fmt: skip
                for kernel, registers, spilled in resources(done.stderr):
                    print(
                        f"sm_{arch} {label:8} {kernel:16} "
                        f"{registers:3} registers, {spilled} bytes spilled",
                        flush=True,
                    )


if __name__ == "__main__":
    main()
