#!/usr/bin/env bash
# The sdist, and the wheel built from what the sdist holds, in dist/. Run in an environment that has the build
# requirements (requirements/build.txt, requirements/cuda.txt) and the dev extra. The wheel has all kernels, whatever
# GPU this machine has.
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
