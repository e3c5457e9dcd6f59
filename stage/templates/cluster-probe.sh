# What a login node is, for `stage env probe --to`. Sent to `sh -s`, after lines that set `folder` (may be empty).
# Prints `KEY<tab>VALUE` lines. It makes and removes one folder on each disk, and changes nothing else; no command asked here can hold it up for long.
LC_ALL=C
export LC_ALL
tab=$(printf '\t')
user=$(id -un)

say() {
    printf '%s\t%s\n' "$1" "$2"
}

have() {
    command -v "$1" >/dev/null 2>&1
}

limited() {
    if have timeout; then timeout 20 "$@" 2>/dev/null; else "$@" 2>/dev/null; fi
}

# room FOLDER WHY: KiB that are free on its disk, KiB that its owner's quota leaves (`-`: it is not known), and both.
room() {
    near=$1
    while [ ! -d "$near" ]; do near=$(dirname "$near"); done
    row=$(limited df -Pk "$near" | sed -n '$p')
    free=$(printf '%s\n' "$row" | awk '{ print $(NF - 2) }')
    quota=
    if have lfs; then
        quota=$(limited lfs quota -q -u "$user" "$near" | tr '\n' ' ')
    fi
    if [ -z "$quota" ] && have quota; then
        quota=$(limited quota -wpu "$user" | grep -F "${row%% *} " | sed -n 1p)
    fi
    # Filesystem, used, quota, limit, ...; `*` after what is over, 0 for no limit.
    left=$(printf '%s\n' "$quota" | tr -d '*[]' |
        awk '{ most = $4 + 0 > 0 ? $4 : $3; if (most + 0 > 0) print (most > $2 ? most - $2 : 0) }')
    is_writable=no # what a disk refuses is best learned by asking it
    if mkdir "$near/.airlift-probe.$$" 2>/dev/null; then
        rmdir "$near/.airlift-probe.$$"
        is_writable=yes
    fi
    say room "$is_writable$tab${free:--}$tab${left:--}$tab$1$tab$2"
}

[ -z "${only_room:-}" ] || { room "$only_room" asked; exit 0; }

say host "$(uname -n)"
say shell "${SHELL:-}"
say home "$HOME"
tools="rsync python3 tar gzip sha256sum setsid nice sbatch squeue sacct sinfo"
for tool in $tools; do
    ! have "$tool" || say tool "$tool"
done
# A login shell reads more: at some sites only it has Slurm, `module`, and the names of the disks.
if have bash; then
    login=$(limited bash -l -c 'printf "\nlogin shell\n"
        for tool in sbatch module; do ! command -v "$tool" >/dev/null || printf "%s\t%s\n" "$tool" "$(command -v "$tool")"
        done; printf "path\t%s\n" "$PATH"
        env | sed -n "s/^\([A-Z0-9_]*\)=\(\/.*\)$/variable\t\1\t\2/p"' </dev/null | sed '1,/^login shell$/d')
    there=$(printf '%s\n' "$login" | sed -n "s/^sbatch$tab//p")
    if ! have sbatch && [ -n "$there" ]; then
        say slurm_folder "${there%/*}"
        PATH=$PATH:${there%/*}
    fi
    case "$tab$login" in *"module$tab"*) say modules yes ;; esac
fi
if have sinfo; then
    say slurm "$(limited sinfo -V | sed -n 1p)"
fi

seen=:
offer() {
    case $1 in /tmp | /tmp/* | /dev/* | /run/* | /proc/* | /var/* | /) return 0 ;; esac
    case $seen in *:"$1":*) return 0 ;; esac
    [ -d "$1" ] && [ -w "$1" ] || return 0
    seen=$seen$1:
    room "$1" "$2"
}
[ -z "$folder" ] || room "$folder" folder
names='(SCRATCH|WORK|PROJECT|DATA|STORE|GROUP)'
variables=$(printf '%s\n' "${login:-}" | grep -E "^variable$tab[A-Z0-9_]*$names[A-Z0-9_]*$tab" | sort -u)
while IFS=$tab read -r _ name value; do
    [ -z "$value" ] || offer "${value%/}" "\$$name"
done <<VARIABLES
$variables
VARIABLES
for disk in scratch work data lustre gpfs project; do offer "/$disk/$user" disk; done
room "$HOME" home
