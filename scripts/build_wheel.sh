#!/usr/bin/env bash
# Builds the sdist, and the wheel from the contents of the sdist, into dist/. Run it in an environment that has the
# build requirements (requirements/build.txt, requirements/cuda.txt) and the dev extra.
set -euo pipefail
cd "$(dirname "$0")/.."
python=${PYTHON:-python3}

rm -rf dist
"$python" -m build --sdist --no-isolation --skip-dependency-check --outdir dist .
sources=$(mktemp -d)
trap 'rm -rf "$sources"' EXIT
tar -xzf dist/flashbwd-*.tar.gz -C "$sources" --strip-components=1
"$python" -m pip wheel -v --no-deps --no-build-isolation --wheel-dir dist "$sources"
