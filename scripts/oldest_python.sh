#!/usr/bin/env bash
# Prints the path of a Python of the oldest version that pyproject.toml supports, or nothing if none is available. The
# script looks on the PATH, in pyenv, in the tool cache of a CI runner and, if it runs as root, in Debian's packages.
set -euo pipefail
version=$(sed -n 's/^requires-python = ">=\(.*\)"$/\1/p' "$(dirname "$0")/../pyproject.toml")

find_one() {
    local candidate
    for candidate in "$(command -v "python$version" || true)" \
        "${PYENV_ROOT:-$HOME/.pyenv}"/versions/"$version".*/bin/python \
        "${RUNNER_TOOL_CACHE:-/nonexistent}"/Python/"$version".*/x64/bin/python; do
        if [ -n "$candidate" ] && "$candidate" -c "import ensurepip, sys; sys.exit('%d.%d' % sys.version_info[:2] != '$version')" 2>/dev/null; then
            echo "$candidate"
            return
        fi
    done
    return 1
}

find_one && exit
if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
    (apt-get update -qq && apt-get install -qq -y "python$version-venv") >/dev/null 2>&1 || true
fi
find_one || true
