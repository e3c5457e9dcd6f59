#!/bin/sh
# Brings the environment beside this script onto this node's own disk, once for all jobs of this user that need it, and
# prints its prefix: the last line of stdout. Started once on each node, before the ranks:
#     srun --ntasks-per-node=1 sh node-local.sh ROOT
# ROOT is a folder on the node's own disk. The same environment has the same prefix on every node, ROOT/airlift-UID/TREE.
#
# Needs what bootstrap.sh needs. Whoever comes while another unpacks waits; a lock whose holder is gone is taken over.
# Whatever happens to the lock, an environment appears whole, by one rename, or not at all: the lock only saves work.
# Environments that no job used for KEEP_DAYS are removed, earlier where the room is needed; never one in use.
# Exit codes: 0 it is there; 1 the bundle is damaged, or not for this machine; 2 wrong usage; 5 no room, run it again.
set -u
umask 077
LC_ALL=C
export LC_ALL
PATH="/usr/bin:/bin:/usr/sbin:/sbin${PATH:+:$PATH}"
export PATH

KEEP_DAYS=14
SETTLE_MINUTES=15 # from when a job takes an environment until its ranks can be seen to run
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

# Temporary folders are swept by age, file by file: one that lost some would break in the middle of a job.
is_whole() {
    [ -f "$prefix.files" ] || return 1
    [ -x "$prefix/bin/python" ] || return 1
    read -r expected <"$prefix.files" || return 1
    found=$(count_files "$prefix")
    [ "$found" -ge "$expected" ]
}

# With the pid, this identifies a process for ever: pids are used again, start times are not.
born() { # 22nd field; the 2nd may have blanks in it
    sed -n 's/^.*) //p' "/proc/$1/stat" 2>/dev/null | cut -d' ' -f20
}

# Whether the holder of the lock is at work. What is not known counts as at work.
is_held() {
    holder_node='' holder_pid='' holder_born=''
    if ! read -r holder_node holder_pid holder_born <"$lock/holder" 2>/dev/null; then
        # It is just being made, or its maker died in that moment.
        [ -z "$(find "$lock" -prune -mmin +1 2>/dev/null)" ]
        return
    fi
    [ "$holder_node" = "$node" ] || return 0
    [ -n "$holder_born" ] && [ "$(born "$holder_pid")" = "$holder_born" ]
}

# One of the waiters takes over; the lock is renamed away and looked at again, for it may be a new one by then.
take_over() {
    aside=$lock.stale.$$
    mv "$lock" "$aside" 2>/dev/null || return 0
    taken=$lock
    lock=$aside
    if is_held; then
        lock=$taken
        mv "$aside" "$lock" 2>/dev/null || rm -rf "$aside" # its holder will find that it need not remove it
        return 0
    fi
    lock=$taken
    say "took over from ${holder_pid:+process }${holder_pid:-a job} that ended while unpacking"
    rm -rf "$aside"
}

acquire() {
    started=$(now)
    told=
    until mkdir "$lock" 2>/dev/null; do
        if is_whole; then return 1; fi
        if ! is_held; then
            take_over
            continue
        fi
        [ -n "$told" ] || say "waiting: ${holder_pid:+process }${holder_pid:-another job} unpacks it already"
        told=1
        [ $(($(now) - started)) -lt "$WAIT_S" ] || stop 5 "waited $WAIT_S s for ${holder_node:-?} ${holder_pid:-?} to unpack." \
            "See what it does: ps -fp ${holder_pid:-PID}. If it hangs, end it and run this again."
        sleep 1
    done
    trap 'rm -rf "$lock"' EXIT
    trap 'exit 130' INT
    trap 'exit 143' TERM HUP
    printf '%s %s %s\n' "$node" "$$" "$(born $$)" 2>/dev/null >"$lock/holder"
}

# Whether any process that this user may look at runs a program of an environment.
in_use() {
    for link in /proc/[0-9]*/exe; do
        case $(readlink "$link" 2>/dev/null) in "$1"/*) return 0 ;; esac
    done
    return 1
}

# clean MINUTES WHY: removes environments that no job began to use for so long, and none that is in use.
clean() {
    for stamp in "$base"/*.used; do
        [ -f "$stamp" ] || continue
        old=${stamp%.used}
        [ "$old" != "$prefix" ] || continue
        [ -n "$(find "$stamp" -prune -mmin "+$1")" ] || continue
        [ ! -e "$old.lock" ] || continue
        in_use "$old" && continue
        say "removing $old ($(count_files "$old") files): $2"
        rm -f "$stamp" "$old.files"
        mv "$old" "$old.part.gone" 2>/dev/null && rm -rf "$old.part.gone"
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
        say "$prefix is not whole (${found:-0} files); unpacking it again"
        rm -f "$prefix.files"
        mv "$prefix" "$prefix.part.broken.$$" && rm -rf "$prefix.part.broken.$$"
    fi
    has_room || clean "$SETTLE_MINUTES" "room is needed"
    has_room || stop 5 "$((kib / 1024)) MiB and $files files are needed in $root, and are not free." \
        "Set AIRLIFT_NODE_ROOT to a larger disk of the nodes, or run with environment.node_local: false."
    started=$(now)
    sh "$here/bootstrap.sh" "$prefix" >&2
    code=$?
    # Another may have been quicker where the lock did not hold; what appeared is whole.
    [ "$code" -eq 0 ] || [ -x "$prefix/bin/python" ] || exit "$code"
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
