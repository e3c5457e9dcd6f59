#!/bin/sh
# Makes the environment `@ASSET@` at the prefix that you give:
#
#     sh bootstrap.sh PREFIX            unpack, relocate, prove; then it is there, or nothing is
#     sh bootstrap.sh --check PREFIX    only say whether that would work, and whether it would run here
#
# Needs sh, tar, gzip and sha256sum; no Python, no conda, no network, no root. Exit codes: 0 done; 1 damaged, or not for
# this machine; 2 wrong usage (PREFIX exists, is too long); 5 could not finish (disk): run it again.
# One that was locked on a site's own torch (`provides` below) needs that: run this after `module load`, or in the container.
# Written by `stage fetch`; the same words for sh, dash, bash and busybox.

asset='@ASSET@'
image_sha256='@IMAGE_SHA256@'
tree='@TREE@'
longest_prefix='@LONGEST_PREFIX@' # bytes
needed_kib='@SIZE_KIB@'
needed_files='@FILES@'
needed_glibc='@GLIBC@'
machine='@MACHINE@'
provides='@PROVIDES@' # NAME==VERSION of what the site's Python brings; empty: the environment is whole

newline='
'

stop_as() { # an exit code; its reason was printed before
  ended=1
  exit "$1"
}

say() { printf '%s\n' "$*"; }

# What ends the shell itself (it cannot fork: no memory, no more processes) is no verdict on anything.
finish() {
  code=$?
  if [ -n "$part" ]; then
    rm -rf "$part"
    [ "$parent" = "$exists" ] || rmdir "$parent" 2>/dev/null # as it was; kept if somebody else uses it
  fi
  [ -n "$ended" ] || code=5
  exit "$code"
}

stop() { # exit code, what, what to do
  code=$1
  printf '%s: %s\n' "$asset" "$2" >&2
  if [ -n "${3:-}" ]; then printf '  -> %s\n' "$3" >&2; fi
  stop_as "$code"
}

find_tools() {
  # An empty PATH is met in batch jobs and cron; the user's own comes last, for systems that keep tools elsewhere.
  PATH="/usr/bin:/bin:/usr/sbin:/sbin${PATH:+:$PATH}"
  export PATH
  for tool in tar gzip sha256sum df uname mkdir chmod rm sleep tr; do
    unset -f "$tool" # bash takes functions from its environment
    command -v "$tool" >/dev/null 2>&1 || stop 2 "\`$tool\` is not here, neither in /usr/bin nor on PATH." \
      "Run this on a login node, or ask the site for it."
  done
}

resolve_prefix() {
  prefix=$1
  case $prefix in /*) ;; *) prefix=$PWD/$prefix ;; esac
  while [ "$prefix" != "${prefix%/}" ]; do prefix=${prefix%/}; done
  parent=${prefix%/*}
  name=${prefix##*/}
  case $name in '' | . | ..) stop 2 "$1 names no new folder." "Give a path such as \$HOME/envs/$asset" ;; esac
  last=
  if [ ! -d "${parent:-/}" ] && [ ! -e "$parent" ] && [ ! -L "$parent" ]; then # ~/envs of a new account; more is rather a typo
    last=${parent##*/}
    parent=${parent%/*}
  fi
  [ -d "${parent:-/}" ] || stop 2 "${prefix%/*} is not a folder." "mkdir -p '${prefix%/*}'"
  exists=$(cd "${parent:-/}" && pwd) || stop 2 "$parent cannot be entered."
  parent=${exists%/}${last:+/$last}
  prefix=${parent%/}/$name
}

check_prefix() {
  [ ${#prefix} -le "$longest_prefix" ] || stop 2 \
    "$prefix is ${#prefix} bytes long; the environment's programs have room for $longest_prefix." "Choose a shorter path."
  case $prefix in
    *[!-A-Za-z0-9._/+@=,~]*)
      bad=$(printf '%s' "$prefix" | tr -d 'A-Za-z0-9._/+@=,~-' | tr -d '\200-\377')
      [ -z "$bad" ] || stop 2 "$prefix has '$bad' in it, which scripts of the environment would trip over." \
        "Choose a path of letters, digits and - . _ + @ = , ~"
      ;;
  esac
  if [ -e "$prefix" ] || [ -L "$prefix" ]; then
    if [ "$only" != --check ]; then clear_leftovers; fi
    if [ -f "$prefix/.airlift/tree.txt" ]; then
      sha256_of "$prefix/.airlift/tree.txt"
      [ "$sum" != "$tree" ] || stop 2 "$prefix is this very environment already." "Use it: . '$prefix/activate'"
    fi
    stop 2 "$prefix exists." "Choose another path, or remove it first."
  fi
  [ -w "$exists" ] || stop 2 "$exists cannot be written by you." "Choose a path in a folder of yours."
}

check_machine() {
  found=$(uname -m) || stop 5 "\`uname\` cannot be run." "Look at \`ulimit -a\`; then run it again."
  [ "$found" = "$machine" ] || stop 1 "it is for $machine; this machine is $found." "Run it on the cluster's own nodes."
  found=$(getconf GNU_LIBC_VERSION 2>/dev/null) || found=
  found=${found##* }
  if [ -n "$needed_glibc" ] && [ -n "$found" ] && older "$found" "$needed_glibc"; then
    stop 1 "its packages need glibc $needed_glibc; this machine has $found." \
      "Lock it again on the laptop for a profile with glibc: \"$found\" (stage env probe prints one)."
  fi
}

older() { # is version $1 (MAJOR.MINOR) older than $2?
  [ "${1%%.*}" -lt "${2%%.*}" ] || { [ "${1%%.*}" -eq "${2%%.*}" ] && [ "$(minor "$1")" -lt "$(minor "$2")" ]; }
}

minor() {
  rest=${1#*.}
  say "${rest%%.*}"
}

in_site() { # a command in the caller's own surroundings, which a module's python may need
  (
    cd / || exit 5 # not a folder to import from
    PATH=$called_with
    [ -z "$library_path" ] || export LD_LIBRARY_PATH="$library_path"
    [ -z "$preload" ] || export LD_PRELOAD="$preload"
    exec "$@"
  )
}

# What a python is, compared with what this environment was locked on: `no` and the difference, or `ok`, the python that
# it starts (that of a virtual environment is a link), and the folders it imports from.
# shellcheck disable=SC2016
question='
import os, sys, sysconfig

wanted = dict(word.split("==") for word in sys.argv[1:])
needed = ".".join(wanted.pop("python").split(".")[:2])

def stop(text):
    print("no " + text)
    sys.exit()

if os.path.isdir(os.path.join(sys.prefix, ".airlift")):
    stop("%s is of an environment of airlift, and not the site\x27s: airlift_deactivate first." % sys.executable)
kind = sys.implementation.name + ", free-threaded" * bool(sysconfig.get_config_var("Py_GIL_DISABLED"))
found = "%d.%d" % sys.version_info[:2]
if kind != "cpython" or found != needed:
    kind = "" if kind == "cpython" else " (%s)" % kind
    stop("it is for the site\x27s Python %s; %s is %s%s." % (needed, sys.executable, found, kind))
from importlib.metadata import PackageNotFoundError, version

for name in wanted:
    try:
        found = version(name)
    except PackageNotFoundError:
        found = "no " + name
    if found != wanted[name]:
        stop("it was locked on %s %s; %s has %s." % (name, wanted[name], sys.executable, found))
print("ok\n" + os.path.realpath(getattr(sys, "_base_executable", None) or sys.executable))
print("\n".join(path for path in sys.path if os.path.isabs(path) and path != "/" and os.path.exists(path)))
'

ask() { # sets `answer`: of the python that is given
  # shellcheck disable=SC2086
  answer=$(in_site "$1" -s -c "$question" $provides)
}

check_site() { # sets base and folders
  another="Load the module that it was locked for, or lock again for the profile that env-probe.sh prints here."
  python=$(PATH=$called_with && command -v python3)
  case $python in /*) ;; *) stop 1 "it is for a site's own torch, and there is no python3 on PATH. Nothing was unpacked." \
    "\`module load\` what brings torch, or run this inside the container." ;; esac
  ask "$python"
  case $answer in
    ok*) ;;
    no*) stop 1 "${answer#no } Nothing was unpacked." "$another" ;;
    *) stop 1 "$python does not start (its words are above). Nothing was unpacked." "$another" ;;
  esac
  answer=${answer#ok?}
  base=${answer%%"$newline"*}
  folders=${answer#*"$newline"}
  # A wrapper that starts a container may name a path inside of it, which is another python here, or none.
  PYTHONPATH=$(printf '%s' "$folders" | tr '\n' ':')
  export PYTHONPATH
  answer=
  [ ! -x "$base" ] || ask "$base"
  case $answer in
    ok*) ;;
    *) stop 1 "$python brings the site's torch, but the Python that it names, $base, has none here: it starts a container. \
Nothing was unpacked." "Run this inside that container, and start the ranks in it (slurm.container, slurm.srun)." ;;
  esac
}

check_room() {
  free=$(df -Pk "$exists" 2>/dev/null | { column 4; }) || free=
  if is_number "$free" && [ "$free" -lt "$needed_kib" ]; then
    stop 5 "$((needed_kib / 1024)) MiB are needed in $parent and $((free / 1024)) MiB are free. Nothing was unpacked." \
      "Free some there, or choose another disk."
  fi
  free=$(df -Pi "$exists" 2>/dev/null | { column 4; }) || free=
  if is_number "$free" && [ "$free" -gt 0 ] && [ "$free" -lt "$needed_files" ]; then # some network disks say 0 for unknown
    stop 5 "$needed_files files are needed in $parent and $free more are possible there. Nothing was unpacked." \
      "Remove files there, or choose another disk."
  fi
}

column() { # the given column of the last line
  last=
  while IFS= read -r line; do last=$line; done
  # shellcheck disable=SC2086
  set -- "$1" $last
  shift "$1"
  say "${1:-}"
}

is_number() { case $1 in '' | *[!0-9]*) return 1 ;; esac; }

sha256_of() { # sets `sum`; a file that cannot be read is not known to be damaged
  sum=$(sha256sum <"$1") || stop 5 "$1 could not be read (the words are above). Nothing is known of it." \
    "Look at its rights, at the disk and at \`ulimit -a\`; then run it again."
  sum=${sum%% *}
}

check_image() {
  [ -f "$here/image.tar.gz" ] || stop 1 "$here/image.tar.gz is missing." "Copy the bundle again: rsync -c, or stage push."
  sha256_of "$here/image.tar.gz"
  [ "$sum" = "$image_sha256" ] || stop 1 \
    "$here/image.tar.gz is damaged: it is not the file that was made. Nothing was unpacked." \
    "stage verify says which part of it, where airlift is; or copy it again."
}

check_bundle() { # this script could be the damaged one: the bundle's own list says what it and the image should be
  list=$here/../../../manifest-sha256.txt
  [ -f "$list" ] || return 0
  for file in bootstrap.sh image.tar.gz; do
    listed=
    while IFS= read -r line; do
      case $line in *"  data/envs/$asset/$file") listed=${line%% *} ;; esac
    done <"$list"
    sum=$image_sha256
    case $file in image.tar.gz) ;; *) sha256_of "$here/$file" ;; esac
    [ "$sum" = "$listed" ] || stop 1 "$here/$file is not the one that the bundle lists." "Copy the bundle again."
  done
}

remove() { # the tar of a run that was killed alone lives on, and writes
  for _ in 1 2 3 4 5 6 7 8 9 10; do
    why=$(rm -rf "$1" 2>&1)
    [ -e "$1" ] || return 0
    sleep 1
  done
  # rm may have taken the owner's name; without it, nobody would dare to remove the rest.
  { mkdir -p "$1/.airlift" && uname -n >"$1/.airlift/owner"; } 2>/dev/null
  say "left for the next run to remove: $old"
  say "  ${why%%"$newline"*}"
}

gone() { # whether no such process is here; one of somebody else, in a folder of a group, is
  why=$(LC_ALL=C kill -0 "$1" 2>&1) && return 1
  case $why in *ermi*) return 1 ;; esac
}

clear_leftovers() { # what runs that were killed on this machine left beside PREFIX
  for old in "$prefix".part.*; do
    [ -d "$old" ] || continue
    owner=
    [ -f "$old/.airlift/owner" ] && read -r owner <"$old/.airlift/owner"
    if [ "$owner" = "$(uname -n)" ] && gone "${old##*.}"; then
      say "removing what an interrupted run left: $old"
      remove "$old"
    else
      say "left alone: $old, of another run, perhaps on ${owner:-another machine}. If it has ended: rm -rf '$old'"
    fi
  done
}

try_out() { # what `noexec` refuses is best learned by asking, and before much is written
  trial=$part/.airlift/trial
  printf '#!/bin/sh\nexit 0\n' >"$trial" || stop 5 "$trial cannot be written." "Look for a full disk or a quota."
  chmod 755 "$trial"
  "$trial" 2>/dev/null || stop 1 "programs on $parent cannot be run (mounted noexec). Nothing was unpacked." \
    "Choose another disk."
  rm -f "$trial"
  ! [ -e "$part/.AIRLIFT" ] || stop 1 \
    "$parent is on a disk that ignores case; names of the environment need one that does not. Nothing was unpacked." \
    "Choose another disk."
}

unpack() {
  part=$prefix.part.$$
  trap 'stop_as 130' INT
  trap 'stop_as 143' TERM HUP
  [ -d "$parent" ] || say "making $parent"
  mkdir -p "$part/.airlift" || stop 5 "$part cannot be made."
  uname -n >"$part/.airlift/owner" || stop 5 "$part cannot be written."
  try_out
  tar -xzof "$here/image.tar.gz" -C "$part" || stop 5 "unpacking stopped (tar's words are above); nothing is left of it." \
    "Look for a full disk or a quota, then run it again."
  say "checking and compiling $needed_files files"
  set -- -I -S -B "$part/.airlift/relocate.py" "$part" "$prefix" "$tree"
  if [ -n "$provides" ]; then
    say "then importing its packages on the site's torch"
    printf '%s\n%s\n' "$base" "$folders" >"$part/.airlift/site" || stop 5 "$part cannot be written."
    in_site "$base" "$@"
  else
    "$part/bin/python" "$@"
  fi
  code=$?
  case $code in
    0) ;;
    1 | 5) stop_as "$code" ;;
    126 | 127) stop 5 "$part/bin/python does not start (exit code $code)." "Is the disk mounted noexec? Choose another." ;;
    *) stop 5 "relocation ended with exit code $code; nothing is left of it." "Run it again." ;;
  esac
  part=
  trap - INT TERM HUP
}

main() {
  set -u
  LC_ALL=C # lengths are bytes
  export LC_ALL
  unset CDPATH TAR_OPTIONS TAPE GZIP POSIXLY_CORRECT # settings of `cd`, tar and gzip: they could unpack something else
  called_with=${PATH-} library_path=${LD_LIBRARY_PATH-} preload=${LD_PRELOAD-}
  unset LD_LIBRARY_PATH LD_PRELOAD LD_AUDIT # of loaded modules: the environment brings its own
  part='' ended=''
  trap finish EXIT
  only=
  case ${1:-} in
    --check)
      only=$1
      shift
      ;;
  esac
  usage="sh bootstrap.sh [--check] PREFIX"
  case ${1:-} in
    '') stop 2 "where to?" "$usage" ;;
    -h | --help)
      say "usage: $usage"
      stop_as 0
      ;;
    -*) stop 2 "unknown option $1" "$usage" ;;
  esac
  [ $# -eq 1 ] || stop 2 "one PREFIX, without spaces." "$usage"
  case $0 in */*) here=${0%/*} ;; *) here=. ;; esac
  here=$(cd "$here" && pwd)
  find_tools
  resolve_prefix "$1"
  check_prefix
  check_machine
  [ -z "$provides" ] || check_site
  if [ "$only" != --check ]; then clear_leftovers; fi # they take room
  check_room
  check_bundle
  check_image
  if [ "$only" = --check ]; then
    if [ -f "$here/env-check.sh" ]; then sh "$here/env-check.sh" "$prefix" || stop_as $?; fi
    say "$asset: $prefix can be made."
    stop_as 0
  fi
  unpack
  say "$asset: $prefix is made; tree $tree"
  say "use it: . '$prefix/activate'"
}

main "$@"
stop_as 0
