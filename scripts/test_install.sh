#!/usr/bin/env bash
# Usage: test_install.sh PYTHON TORCH DISTRIBUTION...
# Creates a new environment of PYTHON, installs each DISTRIBUTION (an sdist or a wheel) there, one after the other, and
# checks it outside of the source tree. TORCH is "shared" or a requirement such as torch==2.10.0, which the script
# installs first. A shared environment sees the packages of the virtual environment of PYTHON, so that torch and the
# build requirements need not be installed twice.
# The script fails if pip's log has an error message of a compiler. It also fails if the build of an sdist has kernels
# on a machine without a GPU, unless FLASHBWD_CUDA or FLASHBWD_CUDA_ARCHS is set.
set -euo pipefail
root=$(cd "$(dirname "$0")/.." && pwd)
python=$1 torch=$2
shift 2
distributions=()
for file; do distributions+=("$(realpath "$file")"); done
place=$(mktemp -d)
trap 'rm -rf "$place"' EXIT

"$python" -m venv "$place/environment"
installed=$place/environment/bin/python
isolation=()
if [ "$torch" = shared ]; then
    parents=$("$python" -c 'import sys; print(*[p for p in sys.path if p.endswith("-packages")], sep="\n")')
    "$installed" -m pip uninstall --quiet --yes setuptools 2>/dev/null # an old version from venv
    echo "$parents" >"$(echo "$place"/environment/lib/python3*/site-packages)/packages_of_parent.pth"
    isolation=(--no-build-isolation)
else
    "$installed" -m pip install --quiet "$torch"
fi

cd "$place"
for file in "${distributions[@]}"; do
    echo "pip install $(basename "$file")"
    # With --no-deps, pip does not replace the torch under test. pip check verifies the requirements below.
    if ! "$installed" -m pip install -v --no-deps --force-reinstall "${isolation[@]}" "$file" >pip.log 2>&1; then
        cat pip.log
        exit 1
    fi
    if grep -nE '\b([Ee]rror|fatal)\b' pip.log; then
        echo "pip's log has the error messages above, though it installed $(basename "$file")"
        exit 1
    fi
    "$installed" -m pip check
    "$installed" "$root/scripts/smoke.py"
    if [[ $file == *.tar.gz ]]; then
        kernels=$(cd "$root" && "$installed" -c 'from build_tools.toolchain import cuda_wanted; print(cuda_wanted())')
        library=$(echo "$place"/environment/lib/python3*/site-packages/flashbwd/_C_cuda.so)
        if [ "$kernels" = False ] && [ -e "$library" ]; then
            echo "the build has kernels, which this machine cannot run"
            exit 1
        fi
    fi
done
