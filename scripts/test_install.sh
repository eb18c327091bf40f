#!/usr/bin/env bash
# Usage: test_install.sh PYTHON [PIP_ARGUMENTS...]
# Runs the README's "pip install ." on a copy of the sources in a fresh environment of PYTHON, and checks the result
# outside of the source tree. If PYTHON belongs to a virtual environment, the fresh one sees its packages, so torch and
# the compilers are not installed twice.
set -euo pipefail
root=$(cd "$(dirname "$0")/.." && pwd)
python=$1
shift
place=$(mktemp -d)
trap 'rm -rf "$place"' EXIT

mkdir "$place/sources"
(cd "$root" && git ls-files -z | tar -c --null -T -) | tar -x -C "$place/sources"
"$python" -m venv "$place/environment"
parents=$("$python" -c 'import sys; print(*[p for p in sys.path if sys.prefix != sys.base_prefix and p.endswith("-packages")], sep="\n")')
if [ -n "$parents" ]; then
    "$place"/environment/bin/python -m pip uninstall --quiet --yes setuptools 2>/dev/null # an old version from venv
    echo "$parents" >"$(echo "$place"/environment/lib/python3*/site-packages)/packages_of_parent.pth"
fi
cd "$place/sources"
"$place/environment/bin/python" -m pip install --quiet "$@" .
cd "$place"
environment/bin/python "$root/scripts/smoke.py"
