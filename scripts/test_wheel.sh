#!/usr/bin/env bash
# Usage: test_wheel.sh WHEEL TORCH_REQUIREMENT [PYTEST_ARGUMENTS...]
# Installs a built wheel beside a torch (for example torch==2.10.0) in a fresh environment, without a compiler, and
# runs the tests against it. KEEP=1 keeps the environment.
set -euo pipefail
root=$(cd "$(dirname "$0")/.." && pwd)
wheel=$(realpath "$1") torch=$2
shift 2
environment=$(mktemp -d)
[ "${KEEP:-}" ] || trap 'rm -rf "$environment"' EXIT

"${PYTHON:-python3}" -m venv "$environment"
"$environment/bin/pip" install --quiet "$torch" "$wheel[test]"
cd "$environment" # not the source tree: the installed package is what is tested
bin/python "$root/scripts/smoke.py"
if [ $# -gt 0 ]; then
    bin/pytest --rootdir "$root" -c "$root/pyproject.toml" -o cache_dir=/tmp/flashbwd_pytest_cache "$@"
fi
