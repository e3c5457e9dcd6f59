# Sourced by the scripts: help, system packages, .venv, installation.

# Tests start thousands of processes: without bytecode, each would compile all that it imports.
unset PYTHONDONTWRITEBYTECODE

# help_if_asked ARGUMENT...: if one is -h or --help, prints the comment at the head of the script
# and ends. Call it before cd and before any installation.
help_if_asked() {
    local argument
    for argument in "$@"; do
        case $argument in -h | --help)
            sed -n '/^set /q; s/^# //p' "$0"
            exit 0
            ;;
        esac
    done
}

# need COMMAND PACKAGE WHY: remembers the package if the command is missing
missing=()
need() {
    command -v "$1" >/dev/null || PATH="$PATH:/usr/sbin:/sbin" command -v "$1" >/dev/null ||
        missing+=("$2|$3")
}

# Installs the missing packages where it can (root, Debian); else prints what is skipped.
install_missing() {
    [ ${#missing[@]} -eq 0 ] && return 0
    local packages=("${missing[@]%%|*}") entry
    if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
        echo "\$ apt-get install ${packages[*]}"
        if apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq \
            --no-install-recommends "${packages[@]}" >/dev/null; then
            return 0
        fi
        echo "apt-get failed; continuing without:"
    elif [ "$(id -u)" = 0 ]; then
        echo "not installed (no apt-get here; install them with this system's package manager):"
    else
        echo "not installed (only root can: apt-get install ${packages[*]}):"
    fi
    for entry in "${missing[@]}"; do
        echo "  ${entry%%|*}: ${entry#*|}"
    done
}

# find_python [FIRST]: FIRST or else the first Python >= 3.10 on PATH that can make a virtual
# environment, in $python
find_python() {
    local candidate unable=()
    for candidate in "$@" python3 python3.13 python3.12 python3.11 python3.10 python3.14; do
        # A shim of pyenv may exist and fail.
        "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 10))' 2>/dev/null || continue
        python=$candidate
        makes_venvs || install_venv
        makes_venvs && return 0
        unable+=("$candidate")
    done
    if [ ${#unable[@]} -gt 0 ]; then
        echo "error: ${unable[*]} cannot make virtual environments" >&2
        echo "  -> install python3-venv (Debian, Ubuntu: apt-get install python3-venv)," \
            "then run this again" >&2
    else
        echo "error: no Python >= 3.10 on PATH (python3 is $(python3 --version 2>&1 || true))" >&2
        echo "  -> install one (python.org, uv, conda, your system's packages)," \
            "then run this again" >&2
    fi
    exit 2
}

# Prints the build of a Python: "3.11.2 /usr"; fails if it does not run, as a shim of pyenv may.
build_of() {
    "$1" -I -c 'import os, platform, sys
print(platform.python_version(), os.path.realpath(sys.base_prefix))' 2>/dev/null
}

makes_venvs() {
    "$python" -c 'import ensurepip, venv' 2>/dev/null
}

# Installs Debian's package for virtual environments, as root; only for the system's Pythons.
install_venv() {
    local package
    package=$("$python" -c 'import sys
print(*sys.version_info[:2], sep=".") if sys.base_prefix == "/usr" else print(0)')
    if [ "$package" != 0 ] && [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
        echo "\$ apt-get install python$package-venv"
        apt-get update -qq &&
            DEBIAN_FRONTEND=noninteractive apt-get install -y -qq "python$package-venv" >/dev/null
    fi
}

# make_venv [FOLDER EXTRAS PYTHON]: makes a virtual environment with this checkout and its
# requirements (.venv: all extras for training and testing). pip runs only if pyproject.toml or the
# constraints changed. Other folders are filled by the uv in .venv, which is faster; .venv itself is
# not, since uv does not read pip's configuration, where a user may name a mirror.
make_venv() {
    local folder=${1:-.venv} extras=${2:-train,dev} stamp wanted install
    python=${3:-}
    stamp=$folder/.airlift-installed
    if [ ! -x "$folder/bin/python" ]; then
        [ -n "$python" ] || find_python
        echo "\$ $python -m venv $folder"
        "$python" -m venv "$folder" || return
    fi
    wanted=$(cat pyproject.toml envs/constraints.txt | cksum)
    [ "$folder" = .venv ] || wanted+=" $PWD"  # several checkouts share it
    if [ "$(cat "$stamp" 2>/dev/null)" != "$wanted" ]; then
        install=("$folder/bin/python" -m pip install -qq --disable-pip-version-check
            --root-user-action=ignore --no-compile)
        [ "$folder" = .venv ] || [ ! -x .venv/bin/uv ] ||
            install=(.venv/bin/uv pip install -q --python "$folder/bin/python")
        echo "\$ pip install -c envs/constraints.txt -e '.[$extras]'    (a minute or more, once)"
        # Before 0.2.0 the distribution had the name of another program.
        "$folder/bin/python" -m pip uninstall -qq -y --disable-pip-version-check \
            --root-user-action=ignore airlift 2>/dev/null || :
        "${install[@]}" -c envs/constraints.txt -e ".[$extras]" || return
        # pip would compile one file after the other. Some are templates and never compile.
        [ "$folder" != .venv ] || "$folder/bin/python" -m compileall -q -j 2 \
            "$("$folder/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')" \
            >/dev/null 2>&1 || :
        printf '%s\n' "$wanted" >"$stamp"
    fi
}
