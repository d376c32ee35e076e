#!/bin/sh
# Makes or refreshes the project's virtual environment, or checks for Java. Called by the Makefile.
#
#   infra/bootstrap.sh venv [FOLDER]    the environment of requirements.lock in .venv; seconds when nothing changed
#   infra/bootstrap.sh java             one line and exit code 2 unless Java 17 or 21 is there
set -eu

root=$(CDPATH='' cd -- "$(dirname -- "$0")/.." && pwd)
venv=$root/${2:-.venv}
stamp=$venv/.tidegate-stamp

say() { printf '%s\n' "tidegate: $*" >&2; }
fail() { say "$*"; exit 2; }

# Prints the first Python >= 3.11, < 3.14 that runs and can make environments.
# 3.11 first: it is what CI runs. A name on PATH proves nothing: pyenv leaves shims that only print an error.
choose_python() {
    for name in ${PYTHON:-python3.11 python3.12 python3.13 python3}; do
        if "$name" -c 'import sys, venv, ensurepip; sys.exit(not (3, 11) <= sys.version_info[:2] < (3, 14))' >/dev/null 2>&1; then
            printf '%s\n' "$name"
            return
        fi
    done
    fail "${PYTHON:+$PYTHON is not usable: }needs Python 3.11, 3.12 or 3.13 with venv: sudo apt-get install -y python3 python3-venv (or name one: make PYTHON=... demo)"
}

# What the environment is made from; the folder too, since scripts in an environment hold its path.
fingerprint() {
    { printf '%s\n' "$root"; cat "$root/requirements.lock" "$root/pyproject.toml" "$root/infra/kernel/pyproject.toml" "$root/infra/installer.txt" "$0"; } | cksum
}

# The installer: uv on PATH, else uv inside the environment, else the environment's pip.
install_everything() {
    if uv --version >/dev/null 2>&1; then
        set -- uv pip install --python "$venv/bin/python"
    elif "$venv/bin/python" -m pip install --quiet --disable-pip-version-check --require-hashes -r "$root/infra/installer.txt"; then
        set -- "$venv/bin/uv" pip install --python "$venv/bin/python"
    else
        say "no uv for this machine; pip does the same, slower"
        set -- "$venv/bin/python" -m pip install --disable-pip-version-check
    fi
    say "installing the locked packages with hashes (2 GB on disk; 1 to 4 minutes the first time)"
    "$@" --require-hashes -r "$root/requirements.lock"
    # The build tool is in the lock as well: nothing outside it is fetched.
    "$@" --quiet --no-deps --no-build-isolation -e "$root" -e "$root/infra/kernel"
}

make_venv() {
    wanted=$(fingerprint)
    if [ -x "$venv/bin/tidegate" ] && [ "$(cat "$stamp" 2>/dev/null)" = "$wanted" ]; then
        return
    fi
    if ! "$venv/bin/python" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] < (3, 14))' >/dev/null 2>&1; then
        python=$(choose_python)
        say "making ${venv##*/} with $("$python" --version 2>&1)"
        "$python" -m venv --clear "$venv"
    fi
    rm -f "$stamp"
    install_everything
    printf '%s\n' "$wanted" >"$stamp"
    say "the environment is ready"
}

java_version() {
    "${JAVA_HOME:+$JAVA_HOME/bin/}java" -version 2>&1 | sed -n 's/.* version "\(1\.\)\{0,1\}\([0-9][0-9]*\).*/\2/p' | head -n 1
}

check_java() {
    found=$(java_version)
    case $found in
        17 | 21) return ;;
    esac
    if command -v apt-get >/dev/null 2>&1; then how="sudo apt-get install -y openjdk-17-jre-headless"
    elif command -v dnf >/dev/null 2>&1; then how="sudo dnf install -y java-17-openjdk-headless"
    elif command -v brew >/dev/null 2>&1; then how="brew install openjdk@17"
    else how="see https://adoptium.net/installation"
    fi
    fail "needs Java 17 for Spark${found:+ (found Java $found)}; install it with: $how"
}

case ${1:-} in
    venv) make_venv ;;
    java) check_java ;;
    *) fail "usage: infra/bootstrap.sh venv|java" ;;
esac
