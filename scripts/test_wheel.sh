#!/usr/bin/env bash
# Usage: test_wheel.sh WHEEL TORCH_REQUIREMENT [tests [PYTEST_ARGUMENTS...]]
# Installs a built wheel and a torch (for example torch==2.10.0) in a new environment and checks the wheel there. With
# "tests", the script also runs the whole test suite against it; g++ then compiles the modules that only the tests load.
# KEEP=1 keeps the environment.
set -euo pipefail
root=$(cd "$(dirname "$0")/.." && pwd)
wheel=$(realpath "$1") torch=$2 suite=${3:-}
shift $(($# < 3 ? $# : 3))
environment=$(mktemp -d)
[ "${KEEP:-}" ] || trap 'rm -rf "$environment"' EXIT

"${PYTHON:-python3}" -m venv "$environment"
"$environment/bin/pip" install --quiet "$torch" "$wheel[test]"
cd "$environment" # outside of the source tree, so that Python imports the installed package
bin/python "$root/scripts/smoke.py"
if [ "$suite" = tests ]; then
    bin/pip install --quiet ninja "setuptools>=77"
    (cd "$root" && FLASHBWD_CUDA=0 "$environment/bin/python" setup.py -q build_test_modules)
    bin/pytest --rootdir "$root" -c "$root/pyproject.toml" "$root/tests" "$@"
fi
