#!/bin/sh
# Says whether an environment runs on this node and fits at PREFIX, before anything is unpacked:
#     sh env-check.sh [PREFIX]                     beside the environment's env.json, in the bundle
#     sh env-check.sh --environment FOLDER [PREFIX]
# Needs sh and the usual small tools; no Python, no root, no network. Each finding is a line: `ok`, `note` (it runs, but
# this should be known) or `bad` with what to do about it. Exit codes: 0 nothing bad; 1 something is; 2 wrong usage.
set -u

case $0 in */*) here=${0%/*} ;; *) here=. ;; esac
environment=$here
if [ "${1:-}" = --environment ]; then
    environment=${2:?a folder}
    shift 2
fi
wanted=${1:-}
usage="usage: sh env-check.sh [--environment FOLDER] [PREFIX]"
case $wanted in
    -h | --help)
        echo "$usage"
        exit 0
        ;;
    -*)
        echo "env-check: unknown option $wanted" >&2
        echo "  -> $usage" >&2
        exit 2
        ;;
esac
if [ $# -gt 1 ] || [ ! -f "$environment/env.json" ]; then
    echo "$usage   (FOLDER: where env.json is; $environment has none)" >&2
    exit 2
fi
env_probe_functions=1
# shellcheck source=stage/templates/env-probe.sh
. "$here/env-probe.sh"

bad=0

ok() { printf 'ok    %s\n' "$1"; }

note() {
    printf 'note  %s\n' "$1"
    [ -z "${2:-}" ] || printf '      -> %s\n' "$2"
}

bad() {
    printf 'bad   %s\n' "$1"
    printf '      -> %s\n' "$2"
    bad=$((bad + 1))
}

# A field of env.json, which has one a line; fields of fields stand further in.
field() {
    sed -n 's/^ "'"$1"'": *"\{0,1\}\([^"]*[^",]\)"\{0,1\},\{0,1\}$/\1/p' "$environment/env.json" | sed 's/^null$//' | sed -n 1p
}

# older A B: whether version A (MAJOR.MINOR) comes before B.
older() {
    [ "${1%%.*}" -lt "${2%%.*}" ] && return 0
    [ "${1%%.*}" -eq "${2%%.*}" ] || return 1
    minor=${1#*.} other_minor=${2#*.}
    [ "${minor%%.*}" -lt "${other_minor%%.*}" ]
}

is_number() { case $1 in '' | *[!0-9]*) return 1 ;; esac; }

# KiB with a unit.
amount() {
    if [ "$1" -lt 1048576 ]; then
        echo "$(($1 / 1024)) MiB"
    else
        echo "$(($1 / 1048576)).$(($1 % 1048576 * 10 / 1048576)) GiB"
    fi
}

check_machine() {
    needs=$(field platform)
    has=$(platform)
    if [ "$needs" != "$has" ]; then
        bad "the environment is for $needs; this is $(uname -m)" "Lock it again for a profile of this cluster: sh env-probe.sh"
    fi
    needs=$(field glibc)
    has=$(glibc)
    if [ -z "$has" ]; then
        bad "no glibc here (musl?): neither wheels nor conda packages run" "Use another node or container."
    elif [ -n "$needs" ] && older "$has" "$needs"; then
        bad "glibc $has; the environment needs $needs" \
            "On the laptop: stage env lock with a profile that says glibc: \"$has\". It names the versions that fit."
    else
        ok "glibc $has${needs:+; the environment needs $needs}"
    fi
}

check_gpu() {
    needs=$(field cuda)
    if grep -q '^ "provides": {' "$environment/env.json"; then
        note "its torch is the site's: not looked at here" \
            "bootstrap.sh compares what python3 has, with the site's module loaded or in its container"
        return 0
    elif [ -z "$needs" ]; then
        ok "no CUDA in the environment, so no GPU is needed"
        return 0
    fi
    look_for_gpu
    if [ -n "$other" ]; then
        note "CUDA $needs in the environment; the GPU of this node is $other" \
            "For such nodes, make one on the site's own torch: docs/howto/site-torch.md"
        return 0
    elif [ -z "$cuda" ]; then
        partition=$(gpu_partitions | sed -n '1s/ .*//p')
        note "CUDA $needs in the environment, and no GPU that answers on this node: not checked" \
            "On a node with one: srun -p ${partition:-PARTITION} --gres=gpu:1 -t 5 sh $0 --environment $environment"
        return 0
    fi
    if [ "${needs%%.*}" -gt "${cuda%%.*}" ]; then
        bad "CUDA $needs in the environment; the driver here ($driver) has CUDA $cuda" \
            "Ask the site for a newer driver, or lock again with this node's profile: sh env-probe.sh"
        return 0
    fi
    if older "$cuda" "$needs"; then
        note "CUDA $needs on a driver with CUDA $cuda runs by minor-version compatibility; PTX does not"
    else
        ok "CUDA $needs; the driver ($driver) has CUDA $cuda"
    fi
    check_capability
}

# Whether torch has code for this GPU: for the same major version and no newer minor, or as PTX, which the driver
# compiles if it is not older than the CUDA that made it.
check_capability() {
    architectures=$(field architectures)
    torch=$(field torch)
    [ -n "$torch" ] || return 0
    if [ -z "$architectures" ] || [ -z "$capability" ]; then
        note "not known whether torch $torch was built for $gpu" \
            "In the environment: python -c 'import torch; print(torch.cuda.get_arch_list())'"
        return 0
    fi
    for architecture in $architectures; do
        compiled_for=${architecture%+PTX}
        older "$capability" "$compiled_for" && continue
        if [ "${compiled_for%%.*}" = "${capability%%.*}" ] ||
            { [ "$architecture" != "$compiled_for" ] && ! older "$cuda" "$needs"; }; then
            ok "torch $torch has code for $gpu (compute capability $capability)"
            return 0
        fi
    done
    bad "torch $torch has no code for $gpu (compute capability $capability), only for $architectures" \
        "On the laptop: stage env lock with this node's profile (sh env-probe.sh). It names the torch that fits."
}

# The nearest folder above a path that is there.
nearest() {
    folder=$1
    while [ ! -d "$folder" ]; do folder=$(dirname "$folder"); done
    printf '%s' "$folder"
}

# Made on the login node, checked on a GPU node: the natural order.
is_this_environment() {
    tree=$(field tree)
    [ -n "$tree" ] && [ -f "$1/.airlift/tree.txt" ] || return 1
    found=$(sha256sum <"$1/.airlift/tree.txt" 2>/dev/null) || return 1
    [ "${found%% *}" = "$tree" ]
}

check_prefix() {
    case $wanted in /*) prefix=$wanted ;; *) prefix=$PWD/$wanted ;; esac
    longest=$(field placeholder)
    if is_this_environment "$prefix"; then
        ok "$prefix is this very environment already: space is not checked"
        return 0
    elif [ -e "$prefix" ] || [ -L "$prefix" ]; then
        bad "$prefix is there already" "Choose another path, or remove it first."
    elif [ "${#prefix}" -gt "${#longest}" ]; then
        bad "$prefix is ${#prefix} bytes long; programs have room for ${#longest}" "Choose a shorter path."
    fi
    strange=$(printf '%s' "$prefix" | tr -d 'A-Za-z0-9._/+@=,~-' | tr -d '\200-\377') # bootstrap.sh refuses the same
    [ -z "$strange" ] || bad "$prefix has '$strange' in it, which scripts of the environment would trip over" \
        "Choose a path of letters, digits and - . _ + @ = , ~"
    place=$(nearest "$prefix")
    try_out "$place" || return 0
    check_room "$place"
    check_quota "$place"
}

# What a file system refuses is best learned by asking it.
try_out() {
    trial=$1/.env-check.$$
    if ! mkdir "$trial" 2>/dev/null; then
        bad "$1 cannot be written by you" "Choose a folder of yours."
        return 1
    fi
    printf '#!/bin/sh\nexit 0\n' >"$trial/program" 2>/dev/null
    chmod 755 "$trial/program" 2>/dev/null
    if ! "$trial/program" 2>/dev/null; then
        bad "programs on $1 cannot be run (mounted noexec, or full)" "Choose another disk."
    fi
    if ! ln -s program "$trial/link" 2>/dev/null; then
        bad "$1 takes no symbolic links" "Choose another disk."
    fi
    rm -rf "$trial"
}

# df_column N FOLDER FLAGS: the last line's column, counted from the end: a device's name may have blanks.
df_column() {
    limited df 15 df "$3" "$2" | sed -n '$p' | sed 's/  */ /g' | awk -v n="$1" '{ print $(NF - n) }'
}

check_room() {
    size=$(field size) files=$(field files) modules=$(field modules)
    size=$((${size:-0} / 1024)) files=$((${files:-0} + ${modules:-0}))
    free=$(df_column 2 "$1" -Pk)
    if ! is_number "$free"; then
        note "$(amount "$size") are needed at $1, which does not say how much is free"
    elif [ "$free" -lt "$size" ]; then
        bad "$(amount "$free") are free at $1; the environment takes $(amount "$size")" "Free some, or choose another disk."
    else
        ok "$(amount "$size") are needed at $1, $(amount "$free") are free"
    fi
    free=$(df_column 2 "$1" -Pi)
    if is_number "$free" && [ "$free" -gt 0 ] && [ "$free" -lt "$files" ]; then # network disks say 0 for unknown
        bad "$files files are needed at $1 and $free more are possible" "Remove files, or choose another disk."
    else
        ok "$files files"
    fi
}

# The user's own limits, which df does not know: `used limit` of KiB and of files, from Lustre or else from quota.
quota_of() {
    who=$(id -un)
    if have lfs && answer=$(limited lfs 15 lfs quota -q -u "$who" "$1") && [ -n "$answer" ]; then
        printf '%s\n' "$answer" | tr '\n' ' '
    elif have quota; then
        device=$(df_column 5 "$1" -Pk)
        limited quota 15 quota -wpu "$who" | grep -F "$device " | sed -n 1p
    fi
}

check_quota() {
    # Filesystem  used  quota  limit  grace  files  quota  limit  grace; `*` after what is over, 0 for no limit.
    # shellcheck disable=SC2046
    set -- "$1" $(quota_of "$1" | tr -d '*[]')
    [ $# -ge 9 ] || return 0
    if left "$3" "$4" "$5" "$size"; then
        bad "$(amount "$left") are left of your quota at $1; $(amount "$size") are needed" \
            "Free some, ask for more, or choose another disk."
    elif left "$7" "$8" "$9" "$files"; then
        bad "$left files are left of your quota at $1; $files are needed" \
            "Remove files, ask for more, or let each node unpack it: \`node_local: true\` in the run file's environment."
    else
        ok "your quota at $1 has room for it"
    fi
}

# left USED SOFT HARD NEEDED: sets left; whether it is less than needed. The hard limit counts, else the soft one.
left() {
    limit=$3
    [ "$limit" != 0 ] || limit=$2
    is_number "$1" && is_number "$limit" && [ "$limit" -gt 0 ] || return 1
    left=$((limit - $1))
    [ "$left" -ge 0 ] || left=0
    [ "$left" -lt "$4" ]
}

check_temporary() {
    place=${TMPDIR:-/tmp}
    if [ ! -d "$place" ] || ! mkdir "$place/.env-check.$$" 2>/dev/null; then
        bad "TMPDIR=$place cannot be written" "export TMPDIR=/tmp (or a folder of yours on the node's own disk)"
        return 0
    fi
    printf '#!/bin/sh\nexit 0\n' >"$place/.env-check.$$/program"
    chmod 755 "$place/.env-check.$$/program"
    "$place/.env-check.$$/program" 2>/dev/null ||
        note "$place is mounted noexec: what triton or DeepSpeed compile there will not load" \
            "export TMPDIR to another folder on the node's own disk"
    rm -rf "$place/.env-check.$$"
    free=$(df_column 2 "$place" -Pk)
    if is_number "$free" && [ "$free" -lt 1048576 ]; then
        note "only $(amount "$free") are free in $place" "export TMPDIR to a larger folder on the node's own disk"
    else
        ok "temporary files go to $place"
    fi
}

# mpi4py from PyPI brings no MPI: it loads the site's libmpi when imported.
check_mpi() {
    lock=$environment/conda-lock.yml # each package's address is a line that ends in its file's name
    grep -q -e '/mpi4py-[^/]*\.whl$' -e '/mpi4py-[^/]*\.tar\.gz$' "$lock" 2>/dev/null || return 0
    package=$(sed -n -e 's|.*/\(openmpi-[^/]*\)$|\1|p' -e 's|.*/\(mpich-[^/]*\)$|\1|p' "$lock" | sed -n 1p)
    if [ -n "$package" ]; then
        ok "MPI is in the environment: $package"
        return 0
    fi
    program=$(command -v mpirun 2>/dev/null)
    for folder in $(printf '%s' "${LD_LIBRARY_PATH:-}" | tr ':' ' ') "${program%/bin/mpirun}/lib" /usr/lib64 \
        "/usr/lib/$(uname -m)-linux-gnu"; do
        for library in "$folder"/libmpi.so*; do
            if [ -e "$library" ]; then
                ok "mpi4py finds MPI: $library"
                return 0
            fi
        done
    done
    note "mpi4py is in the environment and no libmpi.so is on this node's paths: importing it would fail" \
        "module load an MPI in the job (module avail mpi), or leave mpi4py out: airlift does not need it"
}

check_machine
check_gpu
if [ -n "$wanted" ]; then
    check_prefix
else
    note "no PREFIX given: space, files and quota are not checked"
fi
check_temporary
check_mpi
if [ "$bad" -gt 0 ]; then
    echo "$bad bad: the environment would not run here as it is"
    exit 1
fi
