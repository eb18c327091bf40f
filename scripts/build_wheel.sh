#!/usr/bin/env bash
# Writes the sdist, and the wheel that is built from the sdist, into dist/. Run it in an environment that has the build
# requirements (requirements/build.txt, requirements/cuda.txt) and the dev extra. The wheel has all kernels, even on a
# machine without a GPU.
set -euo pipefail
export FLASHBWD_CUDA_ARCHS=all
cd "$(dirname "$0")/.."
python=${PYTHON:-python3}

rm -rf dist
"$python" -m build --sdist --no-isolation --skip-dependency-check --outdir dist .
sources=$(mktemp -d)
trap 'rm -rf "$sources"' EXIT
tar -xzf dist/flashbwd-*.tar.gz -C "$sources" --strip-components=1
"$python" -m pip wheel -v --no-deps --no-build-isolation --wheel-dir dist "$sources"
