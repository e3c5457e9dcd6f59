#!/bin/sh
# Brings the environment beside this script onto this node's own disk, once for all jobs of this user that need it, and
# prints its prefix: the last line of stdout. Started once on each node, before the ranks:
#     srun --ntasks-per-node=1 --ntasks=$SLURM_NNODES sh node-local.sh ROOT
# ROOT is a folder on the node's own disk. The same environment has the same prefix on every node, ROOT/airlift-UID/TREE.
#
# Needs what bootstrap.sh needs. A job that comes while another unpacks waits; a lock whose holder is gone is taken over.
# Whatever happens to the lock, an environment appears whole, by one rename, or not at all: the lock only saves work.
# Environments that no job used for KEEP_DAYS are removed, earlier where the room is needed; never one in use.
# Exit codes: 0 it is there; 1 the bundle is damaged, or not for this machine; 2 wrong usage; 5 no room, run it again.
set -u
umask 077
LC_ALL=C
export LC_ALL
called_with=${PATH-} # on it, bootstrap.sh looks for a site's own python3
PATH="/usr/bin:/bin:/usr/sbin:/sbin${PATH:+:$PATH}"
export PATH
unset CDPATH

KEEP_DAYS=14
SETTLE_MINUTES=15 # from when a job takes an environment until its ranks can be seen to run
LEFT_MINUTES=1440 # from when on what a killed job left is removed
WAIT_S=3600

node=$(uname -n)

say() { printf 'node-local: %s: %s\n' "$node" "$*" >&2; }

stop() { # exit code, what, what to do
    code=$1
    printf 'node-local: %s: %s\n' "$node" "$2" >&2
    [ -z "${3:-}" ] || printf '  -> %s\n' "$3" >&2
    exit "$code"
}

# A field of env.json, which has one a line; fields of fields stand further in.
field() {
    sed -n 's/^ "'"$1"'": *"\{0,1\}\([^"]*[^",]\)"\{0,1\},\{0,1\}$/\1/p' "$here/env.json" | sed -n 1p
}

count_files() { find "$1" \( -type f -o -type l \) 2>/dev/null | wc -l | tr -d ' '; }

now() { date +%s; }

# A folder of this user's alone: in /tmp anyone may have made it first.
make_base() {
    mkdir "$base" 2>/dev/null
    # shellcheck disable=SC2012
    if [ -L "$base" ] || [ "$(ls -ldn "$base" 2>/dev/null | awk '{ print substr($1, 1, 10), $3 }')" != "drwx------ $(id -u)" ]; then
        stop 1 "$base is not a folder of yours alone (mode 700)." \
            "Look at who made it: ls -ld $base. Set AIRLIFT_NODE_ROOT to another folder on the nodes' own disks."
    fi
}

# Temporary folders are swept by age, file by file: one that lost some would break in the middle of a job. Files are
# looked for by name: what jobs added (bytecode of python -O, caches) would make up for lost ones in a mere count.
# Sets found (how many of those made are there) and lost (words on those that are not).
is_whole() {
    found=0 lost=bin/python
    [ -x "$prefix/bin/python" ] || return 1
    lost=.airlift/env.json
    [ -f "$prefix/$lost" ] || return 1
    lost=.airlift/tree.txt
    [ -f "$prefix/$lost" ] || return 1
    sum=$(sha256sum <"$prefix/$lost") || stop 5 "$prefix/$lost could not be read." "Look at \`ulimit -a\`; run it again."
    [ "${sum%% *}" = "$tree" ] || return 1
    # A line of tree.txt: kind, sha256, path.
    lost=$(cd "$prefix" && find . \( -type f -o -type l \) 2>/dev/null | awk '
        NR == FNR { made[substr($0, 68)] = 1; count++; next }
        substr($0, 3) in made { delete made[substr($0, 3)]; found++ }
        END {
            for (path in made) if (first == "" || path < first) first = path
            print found + 0, count - found " of " count " files, such as " first
        }' .airlift/tree.txt -)
    [ -n "$lost" ] || stop 5 "the files of $prefix could not be counted." "Look at \`ulimit -a\`; run it again."
    found=${lost%% *} lost=${lost#* }
    [ "${lost%% *}" = 0 ]
}

# With the pid, this identifies a process for ever: pids are used again, start times are not.
born() { # 22nd field; the 2nd may have blanks in it
    sed -n 's/^.*) //p' "/proc/$1/stat" 2>/dev/null | cut -d' ' -f20
}

# is_held LOCK: whether its holder is at work. What is not known counts as at work.
is_held() {
    holder_node='' holder_pid='' holder_born=''
    if ! read -r holder_node holder_pid holder_born <"$1/holder" 2>/dev/null; then
        # It is just being made, or its maker died in that moment.
        [ -z "$(find "$1" -prune -mmin +1 2>/dev/null)" ]
        return
    fi
    [ "$holder_node" = "$node" ] || return 0
    [ -n "$holder_born" ] && [ "$(born "$holder_pid")" = "$holder_born" ]
}

# remove_dead LOCK: it is renamed away and looked at again, for it may be a new one by then.
remove_dead() {
    if is_held "$1"; then return 1; fi
    aside=$1.stale.$$
    mv "$1" "$aside" 2>/dev/null || return 1
    if is_held "$aside"; then
        mv "$aside" "$1" 2>/dev/null || rm -rf "$aside" # its holder will find that it need not remove it
        return 1
    fi
    rm -rf "$aside"
}

acquire() {
    started=$(now)
    printed=
    until mkdir "$lock" 2>/dev/null; do
        if is_whole; then return 1; fi
        if ! is_held "$lock"; then
            # One of the waiters takes over.
            remove_dead "$lock" && say "took over from ${holder_pid:+process }${holder_pid:-a job} that ended while unpacking"
            continue
        fi
        [ -n "$printed" ] || say "waiting: ${holder_pid:+process }${holder_pid:-another job} unpacks it already"
        printed=1
        [ $(($(now) - started)) -lt "$WAIT_S" ] || stop 5 "waited $WAIT_S s for ${holder_node:-?} ${holder_pid:-?} to unpack." \
            "See what it does: ps -fp ${holder_pid:-PID}. If it hangs, end it and run this again."
        sleep 1
    done
    trap 'rm -rf "$lock"' EXIT
    trap 'exit 130' INT
    trap 'exit 143' TERM HUP
    printf '%s %s %s\n' "$node" "$$" "$(born $$)" 2>/dev/null >"$lock/holder"
}

# in_use FOLDER: whether any process that this user may look at runs a program in it.
in_use() {
    real=$(cd "$1" 2>/dev/null && pwd -P) || real=$1 # /proc knows no symbolic links
    for link in /proc/[0-9]*/exe; do
        case $(readlink "$link" 2>/dev/null) in "$real"/*) return 0 ;; esac
    done
    return 1
}

# What jobs left that were killed; younger than a day, it may be of a container here whose processes are not seen.
clear_leftovers() {
    for left in "$base"/*.part.* "$base"/*.stale.* "$base"/*.files.*; do
        [ -n "$(find "$left" -prune -mmin "+$LEFT_MINUTES" 2>/dev/null)" ] || continue
        kill -0 "${left##*.}" 2>/dev/null && continue
        in_use "$left" && continue
        say "removing $left, which a job left that was killed"
        rm -rf "$left"
    done
    for left in "$base"/*.lock; do
        [ -n "$(find "$left" -prune -mmin "+$LEFT_MINUTES" 2>/dev/null)" ] || continue
        remove_dead "$left" && say "removed $left, whose holder is gone"
    done
    # Without a stamp it would never be old: its job was killed before it made one, or a sweep took it.
    for left in "$base"/*; do
        case ${left##*/} in *.*) continue ;; esac
        [ ! -d "$left" ] || [ -e "$left.used" ] || : >"$left.used"
    done
}

# clean MINUTES WHY: removes environments that no job began to use for so long, and none that is in use.
clean() {
    for stamp in "$base"/*.used; do
        [ -f "$stamp" ] || continue
        old=${stamp%.used}
        [ "$old" != "$prefix" ] || continue
        [ -n "$(find "$stamp" -prune -mmin "+$1")" ] || continue
        if [ -e "$old.lock" ]; then remove_dead "$old.lock" || continue; fi
        in_use "$old" && continue
        say "removing $old ($(count_files "$old") files): $2"
        rm -f "$stamp" "$old.files"
        mv "$old" "$old.part.gone.$$" 2>/dev/null && rm -rf "$old.part.gone.$$"
    done
}

has_room() {
    free=$(df -Pk "$base" | awk 'END { print $(NF - 2) }')
    case $free in '' | *[!0-9]*) return 0 ;; esac
    [ "$free" -ge "$kib" ] || return 1
    free=$(df -Pi "$base" 2>/dev/null | awk 'END { print $(NF - 2) }')
    case $free in '' | 0 | *[!0-9]*) return 0 ;; esac # some disks do not count
    [ "$free" -ge "$files" ]
}

unpack() {
    if [ -e "$prefix" ]; then
        if in_use "$prefix"; then
            stop 5 "$prefix lost files ($lost), and a job still runs from it: it is left as it is." \
                "Run this again when that job has ended; until then, environment.node_local: false."
        fi
        say "$prefix lost files ($lost); unpacking it again"
        rm -f "$prefix.files"
        mv "$prefix" "$prefix.part.broken.$$" && rm -rf "$prefix.part.broken.$$"
    fi
    has_room || clean "$SETTLE_MINUTES" "room is needed"
    has_room || stop 5 "$((kib / 1024)) MiB and $files files are needed in $root, and are not free." \
        "Set AIRLIFT_NODE_ROOT to a larger disk of the nodes, or run with environment.node_local: false."
    started=$(now)
    PATH=$called_with /bin/sh "$here/bootstrap.sh" "$prefix" >&2
    code=$?
    # Another may have been quicker where the lock did not hold; what appeared is whole.
    [ "$code" -eq 0 ] || [ -x "$prefix/bin/python" ] || exit "$code"
    # Scripts of earlier bundles with this environment take it for broken without this count.
    count_files "$prefix" >"$prefix.files.$$"
    mv "$prefix.files.$$" "$prefix.files"
    read -r found <"$prefix.files"
    say "unpacked $found files to $prefix in $(($(now) - started)) s"
}

case $0 in */*) here=${0%/*} ;; *) here=. ;; esac
here=$(cd "$here" && pwd) || exit 2
usage="sh node-local.sh ROOT    (a folder on this node's own disk)"
case ${1:-} in
    -h | --help)
        printf 'usage: %s\n' "$usage"
        exit 0
        ;;
    -*) stop 2 "unknown option $1" "$usage" ;;
esac
[ $# -eq 1 ] || stop 2 "where to?" "$usage"
root=${1%/}
if [ ! -d "$root" ] || [ ! -w "$root" ]; then
    stop 5 "$root is not a folder that you can write." "Set AIRLIFT_NODE_ROOT to a folder on the nodes' own disks."
fi
tree=$(field tree)
[ -n "$tree" ] || stop 1 "$here/env.json does not say which environment this is." "stage verify the bundle."
size=$(field size) files=$(field files) modules=$(field modules)
kib=$((${size:-0} / 1024)) files=$((${files:-0} + ${modules:-0}))
base=$root/airlift-$(id -u)
prefix=$base/$(printf '%.16s' "$tree")
lock=$prefix.lock

make_base
clear_leftovers
[ ! -f "$prefix.used" ] || : >"$prefix.used" # from now on nobody else removes it
clean $((KEEP_DAYS * 24 * 60)) "not used for $KEEP_DAYS days"
if is_whole; then
    say "reusing $prefix, $found files"
elif acquire; then
    is_whole || unpack
else
    say "reusing $prefix, $found files, which another job has just unpacked"
fi
: >"$prefix.used"
printf '%s\n' "$prefix"
