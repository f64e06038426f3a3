#!/usr/bin/env bash
# Compiles for 64-bit Arm and tests under QEMU's user mode, which has no timing worth measuring.
#
#   tools/test_aarch64.sh           the C++ suites; from the cross-built wheel, NumPy, the self-test of `tilewise doctor`
#                                   on every instruction set, Python tests of instruction sets and gradients, whose
#                                   buffers PyTorch allocates, and of PyTorch's operators
#   tools/test_aarch64.sh --quick   the C++ suites but the loader's, and the self-test of the best set
set -euo pipefail
cd "$(dirname "$0")/.."

case ${1:-} in
  '') quick= ;;
  --quick) quick=1 ;;
  *) echo "test_aarch64: unknown argument '$1'; only --quick is allowed" >&2 && exit 2 ;;
esac
root=$(tools/setup.sh aarch64)
arm=(qemu-aarch64-static -L "$root")
export PYTHONPATH=python TILEWISE_LIBRARY_DIR=$PWD/build/aarch64

cmake --preset aarch64 >/dev/null
cmake --build --preset aarch64 -j "${JOBS:-$(nproc)}" | tail -n 1

suites=(capi attention internal)
# Loading the library 50 times takes half a minute under QEMU.
[ -n "$quick" ] || suites+=(loader)
# QEMU hangs in a fork beside a thread that starts other threads, as a program of ten lines shows, so the test that does
# this is left out.
for suite in "${suites[@]}"; do
  "${arm[@]}" "build/aarch64/tests/cpp/test_$suite" --gtest_brief=1 --gtest_filter=-Loader.ForkedChildCanCall
done
ctest --test-dir build/aarch64 -L symbols --no-tests=error --output-on-failure | tail -n 3

# The limits that bench/bench_cpu.py compares these sets with.
aarch64-linux-gnu-g++ -O3 -std=c++20 -pthread bench/peaks.cpp -o build/aarch64/peaks
found=$("${arm[@]}" build/aarch64/peaks --repetitions 1)
for limit in portable.fma neon.fma neon_bf16.dot; do
  grep -q "\"$limit\"" <<<"$found" || { echo "bench/peaks.cpp does not measure $limit" >&2 && exit 1; }
done

# A processor without BF16 instructions.
found=$("${arm[@]}" -cpu neoverse-n1 "$root/usr/bin/python3" -c \
  'from tilewise._library import c_library; print(c_library().tilewise_current_cpu().decode())')
[ "$found" = neon ] || { echo "a Neoverse N1 uses $found, not neon" >&2 && exit 1; }

if [ -n "$quick" ]; then
  "${arm[@]}" "$root/usr/bin/python3" -m tilewise doctor --isa neon_bf16
  exit
fi

unset PYTHONPATH TILEWISE_LIBRARY_DIR # from here on the wheel is tested
make wheel ARCH=aarch64
python tools/check_wheel.py dist/tilewise-*_aarch64.whl --run build/wheel-check-aarch64 \
  --python "${arm[*]} $root/usr/bin/python3"
PYTHONPATH=$PWD/build/wheel-check-aarch64 "${arm[@]}" "$root/usr/bin/python3" -m pytest -q -p hypothesispytest \
  tests/python/attention/test_{isa_grid,gradients}.py tests/python/frameworks/test_torch_ops.py
