# Sourced by scripts/demo and scripts/test from the root of the checkout: system packages, .venv, installation.

# need COMMAND PACKAGE WHY: remembers the package if the command is missing
missing=()
need() {
    command -v "$1" >/dev/null || PATH="$PATH:/usr/sbin:/sbin" command -v "$1" >/dev/null || missing+=("$2|$3")
}

# Installs what `need` found missing where that is possible (root, Debian); says what is skipped where it is not.
install_missing() {
    [ ${#missing[@]} -eq 0 ] && return 0
    local packages=("${missing[@]%%|*}") entry
    if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
        echo "\$ apt-get install ${packages[*]}"
        if apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends \
            "${packages[@]}" >/dev/null; then
            return 0
        fi
        echo "apt-get failed; going on without:"
    elif [ "$(id -u)" = 0 ]; then
        echo "not installed (no apt-get here; install them with this system's package manager):"
    else
        echo "not installed (only root can: apt-get install ${packages[*]}):"
    fi
    for entry in "${missing[@]}"; do
        echo "  ${entry%%|*}: ${entry#*|}"
    done
}

# The first Python >= 3.10 on PATH that can make a virtual environment, in $python
find_python() {
    local candidate
    for candidate in python3 python3.13 python3.12 python3.11 python3.10 python3.14; do
        if command -v "$candidate" >/dev/null && "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 10))'; then
            python=$candidate
            "$python" -c 'import ensurepip, venv' 2>/dev/null && return 0
            if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
                echo "\$ apt-get install python3-venv"
                apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq python3-venv >/dev/null
                "$python" -c 'import ensurepip, venv' 2>/dev/null && return 0
            fi
            echo "error: $candidate cannot make virtual environments" >&2
            echo "  -> install python3-venv (Debian, Ubuntu: apt-get install python3-venv), then run this again" >&2
            exit 2
        fi
    done
    echo "error: no Python >= 3.10 on PATH (python3 is $(python3 --version 2>&1 || true))" >&2
    echo "  -> install one (python.org, uv, conda, your system's packages), then run this again" >&2
    exit 2
}

# .venv with everything for training and testing; pip runs only when what it was made from has changed
make_venv() {
    local stamp=.venv/.airlift-installed wanted
    if [ ! -x .venv/bin/python ]; then
        find_python
        echo "\$ $python -m venv .venv"
        "$python" -m venv .venv || return
    fi
    wanted=$(cat pyproject.toml envs/constraints.txt | cksum)
    if [ "$(cat "$stamp" 2>/dev/null)" != "$wanted" ]; then
        echo "\$ pip install -c envs/constraints.txt -e '.[train,dev]'    (a minute or more, once)"
        .venv/bin/python -m pip install -qq --disable-pip-version-check --root-user-action=ignore \
            -c envs/constraints.txt -e '.[train,dev]' || return
        printf '%s\n' "$wanted" >"$stamp"
    fi
}
