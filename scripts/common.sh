# The scripts beside this file source it. It sets $root, $jobs, $python, $float8_tune and the environment of
# cmake (compiler, ccache), and defines helpers; it runs nothing.
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
jobs=$(nproc 2>/dev/null || echo 2)
python=$root/.deps/python/bin/python
float8_tune=$root/build/release/bin/float8-tune
started=$SECONDS
cd "$root"

say() { printf '\n== %s\n' "$*"; }
die() {
  printf '%s: %s\n' "$(basename "$0")" "$*" >&2
  exit 1
}
elapsed() { echo "$((SECONDS - started)) s"; }

# The first of the candidates that is GCC 12 or newer (std::expected), else nothing.
newest_enough_gxx() {
  local name
  for name in ${CXX:-} g++ g++-14 g++-13 g++-12; do
    if command -v "$name" >/dev/null && [ "$("$name" -dumpversion | cut -d. -f1)" -ge 12 ]; then
      echo "$name"
      return
    fi
  done
}

# Uses what scripts/setup has installed; scripts call it again after setup.
use_tools() {
  case ":$PATH:" in
    *":$root/.deps/venv/bin:"*) ;;
    *) if [ -x "$root/.deps/venv/bin/cmake" ]; then PATH=$root/.deps/venv/bin:$PATH; fi ;;
  esac
  local cxx
  cxx=$(newest_enough_gxx)
  if [ -n "$cxx" ]; then
    export CXX=$cxx CC=${CC:-${cxx/g++/gcc}}
  fi
  if command -v ccache >/dev/null; then
    export CMAKE_CXX_COMPILER_LAUNCHER=ccache
  fi
}
use_tools

# build PRESET [TARGET ...]: configures quietly and builds the targets, or everything where none is named.
build() {
  local preset=$1
  shift
  cmake --preset "$preset" -Wno-dev --log-level=WARNING
  cmake --build --preset "$preset" -j "$jobs" ${1:+--target "$@"}
}

# Adds the shim to the release preset; scripts/python-test --setup has fetched the PyTorch that it is built against.
configure_shim() {
  cmake --preset release -Wno-dev --log-level=WARNING -DFLOAT8_PYTHON=ON \
    -DFLOAT8_TORCH_DIR="$("$python" -c "import sysconfig; print(sysconfig.get_path('platlib'))")/torch"
}

# The C and C++ sources that clang-format owns; golden files and fixtures are data.
formatted_sources() {
  find base recipes codegen runtime tuning_db tools python tests benchmarks examples \
    \( -path tests/golden -o -name fixtures \) -prune -o -type f \
    \( -name '*.cpp' -o -name '*.hpp' -o -name '*.c' -o -name '*.h' -o -name '*.cuh' \) -print | sort
}

# The program of exactly the version that .clang-format is written for, else nothing.
clang_format_14() {
  local name
  for name in clang-format-14 clang-format; do
    if command -v "$name" >/dev/null && "$name" --version | grep -q 'version 14\.'; then
      echo "$name"
      return
    fi
  done
}

has_hopper() {
  command -v nvidia-smi >/dev/null &&
    nvidia-smi --query-gpu=compute_cap --format=csv,noheader 2>/dev/null | grep -qx '9\.0'
}
