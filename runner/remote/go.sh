#!/bin/sh
# Takes a run from its bundle, beside it, into the queue: verify, environment, check, submit.
#
#     sh go.sh                         what is done is skipped, so run it again after anything
#     sh go.sh FOLDER                  from a carried disk: copies everything to FOLDER first
#     sh go.sh --results DISK [RUN]    copies the results of a run to a carried disk
#     sh go.sh --list RUN [--checkpoints]   size, sha256 and name of each result of a run
#     sh go.sh --runner ARGUMENTS...   `runner ARGUMENTS...` of this folder's environment
#     sh go.sh --stop                  stops what is at work here: it submits no job any more
#     sh go.sh --state                 WALK HOST PID of it, seconds of its silence; or `none`
#
# `.airlift/plan` says what to do; log, steps and result beside it, what came of it. Exit codes:
# 0 done; 1 damage or a failure; 2 wrong usage; 5 not finished: run it again; 75 another works here.
say() { printf '%s\n' "$*"; }
stop() { # exit code, what, what to do
  printf 'error: %s\n  -> %s\n' "$2" "${3:-Run it again after that is corrected.}" >&2
  exit "$1"
}
digest() { sum=$(sha256sum) && say "${sum%% *}"; }
# A shell runs a file that is cut between two commands, as if it were whole.
[ "$(tail -n 1 "$0")" = 'main "$@"' ] ||
  stop 1 "$0: the end of this file is missing." "On the laptop, the same command again writes it."

# --- The lock is a folder. `beat` in it is touched while its owner, or that one's step, lives.
owner() { cat .airlift/lock/holder 2>/dev/null; } # WALK HOST PID
silence() {                                       # seconds since the last beat, by its disk's clock
  touch .airlift/now
  set -- $(stat -c %Y .airlift/lock/beat 2>/dev/null || stat -c %Y .airlift/lock 2>/dev/null)
  set -- $(($(stat -c %Y .airlift/now) - ${1:-0}))
  [ "$1" -ge -60 ] || set -- 9999 # the clock was put back: no sign of life
  say $(($1 > 0 ? $1 : 0))
}
is_dead() {
  [ -d .airlift/lock ] && silent=$(silence) || return 1
  [ "$silent" -lt 60 ] || return 0
  set -- $(owner)
  [ "${2:-}" = "$(uname -n)" ] && ! kill -0 "$3" 2>/dev/null || return 1
  [ "$silent" -ge 15 ] || say "go.sh was killed here: its step is given 15 s to show that it lives"
  until [ "$silent" -ge 15 ]; do # another machine may have this name
    sleep 1
    set -- "$silent"
    silent=$(silence)
    [ "$silent" -ge "$1" ] || return 1
  done
}
take_lock() {
  [ -f "${from:-.}/.airlift/plan" ] ||
    stop 2 "${from:-$PWD} has no .airlift/plan." \
      "runner submit RUN --to ... on the laptop writes it."
  [ -z "$from" ] || is_written "$from" || stop 1 \
    "$from: go.sh and .airlift/plan are not those that were written together: damaged?" "$rewrite"
  dead=$(owner)
  if is_dead && mv .airlift/lock ".airlift/dead.$$" 2>/dev/null; then
    # Another took it over since it was looked at? Then it is given back.
    [ "$(cat ".airlift/dead.$$/holder" 2>/dev/null)" = "$dead" ] || mv ".airlift/dead.$$" .airlift/lock
    rm -rf ".airlift/dead.$$"
  fi
  said=$({ umask 022 && mkdir -p .airlift && mkdir .airlift/lock; } 2>&1) || [ ! -d .airlift/lock ] ||
    stop 75 "another go.sh is at work here: $(owner)" "tail -f '$PWD/.airlift/log' follows it."
  [ -d .airlift/lock ] || stop 5 "$PWD cannot be written: ${said##*: }." \
    "Correct that, or take another folder of yours that the compute nodes see; then run it again."
  read_plan
  me="$WALK $(uname -n) $$"
  { say "$me" >.airlift/lock/holder && : >.airlift/lock/beat; } || stop 5 "$PWD is full." "$space"
  { [ -t 1 ] && : >>.airlift/log && exec tail -n 0 -f .airlift/log; } &
  shown=$!
  beat </dev/null >/dev/null 2>&1 &
  beater=$!
}
beat() { # the step of a shell that was killed goes on
  trap '' INT
  while kill -0 $$ || { read -r pid <.airlift/lock/step && kill -0 "$pid"; }; do
    [ "$(owner)" = "$me" ] || exit 0
    touch .airlift/lock/beat
    sleep 5
  done
  [ "$(owner)" != "$me" ] || rm -rf .airlift/lock
  kill "$shown"
}
end() { # exit code: writes the result
  code=$1
  [ "$code" -le 5 ] || code=5
  say "$WALK $code $job" >.airlift/result.new && mv -f .airlift/result.new .airlift/result
  kill "$beater" 2>/dev/null
  [ "$(owner)" != "$me" ] || rm -rf .airlift/lock
  ! kill -0 "$shown" 2>/dev/null || { sleep 1 && kill "$shown"; }
  case $code,$job in
    0,0) say "nothing was submitted: the run is finished" ;;
    0,*) say "job $job is in the queue; its results: sh '$PWD/go.sh' --results DISK" ;;
    *)
      [ -t 1 ] || tail -n 10 .airlift/log >&2
      say "$PWD/.airlift/log has all words; correct that, then run it again: it goes on"
      [ -z "$from" ] || [ "$code" != 1 ] || say "Where the disk itself is damaged: $rewrite"
      ;;
  esac
  exit "$code"
}

# --- Programs.
in_setup() { # a command as the job runs it: after the lines of SETUP, in a login shell; execs
  if [ -z "$SETUP" ] && { command -v sbatch || ! command -v bash; } >/dev/null 2>&1; then exec "$@"; else
    exec bash -l -c "set -e
trap 'echo \"error: one of these lines of setup ended the shell, with \$?: \$1\" >&2' EXIT
$SETUP
trap - EXIT
shift
exec \"\$@\"" bash "$SETUP" "$@"
  fi
}
in_queue() { # the state of a job that waits or runs; `?`: Slurm does not answer
  # A login shell may print a greeting first.
  set -- sh -c 'echo; echo @@; squeue -h -j "$1" -o %T 2>&1' sh "$1"
  states=$(in_setup "$@" </dev/null 2>/dev/null | sed '1,/^@@$/d')
  case $states in *nvalid\ job\ id*) ;; *[!A-Z_$newline]*) say '?' ;; *) say "$states" ;; esac
}
readers() { # the jobs that wait or run here, of any name
  set -- sh -c 'echo; echo @@; squeue -h -u "$(id -un)" -o "%A %o"'
  in_setup "$@" </dev/null 2>/dev/null | sed "1,/^@@\$/d" | grep -F " $(pwd -P)/output/" | cut -d' ' -f1
}
find_python() { # sets `python`: 3.6 or newer, or empty; and takes four cores, of a login node
  code='import os, random, sys
if sys.version_info < (3, 6): sys.exit(1)
mine = sorted(os.sched_getaffinity(0))
os.sched_setaffinity(int(sys.argv[1]), random.sample(mine, min(4, len(mine))))'
  for python in "$prefix/bin/python" python3 /usr/libexec/platform-python \
    python3.12 python3.11 python3.9 python3.8 ''; do
    [ -z "$python" ] || ! "$python" -I -c "$code" $$ 2>/dev/null || break
  done
}
run() { # the runner of the environment, or what SETUP brings
  [ -n "$ENVIRONMENT" ] || in_setup runner "$@"
  [ -x "$prefix/bin/python" ] || exit 127 # not made yet
  in_setup "$prefix/bin/python" "$prefix/bin/runner" "$@"
}

# --- The steps. `is_STEP`: whether it is done; `do_STEP` does it.
is_written() { # FOLDER: whether plan and script in it are those that the laptop wrote to the disk
  said=$(cd "$1" && sha256sum -c "$from/.airlift/carried" 2>/dev/null)
  [ "$said" = ".airlift/plan: OK${newline}go.sh: OK" ]
}
is_intact() { # the run file, and what it names: as the plan has them
  (cd "$RUNS" && say "$INPUTS" | sha256sum -c) >/dev/null 2>&1
}
is_copy() { # from a carried disk
  [ ! -s .airlift/damaged ] && cmp -s "$from/bundle/$seal" "bundle/$seal" && is_written . && is_intact
}
do_copy() { # each file whole or not at all; the seal of the bundle, and this script, at the end
  umask 022 # a shell obeys some of them: they are written by their owner alone
  count=$(sed -n 's/^Payload-Oxum: [0-9]*\.//p' "$from/bundle/bag-info.txt")
  [ "$(find "$from/bundle/data" -type f | grep -c .)" -ge "${count:-1}" ] ||
    stop 1 "$from/bundle: files are missing. Nothing was changed." "$rewrite"
  [ ! -f bundle/stage.lock ] ||
    [ "$(tail -n 2 bundle/stage.lock)" = "$(tail -n 2 "$from/bundle/stage.lock")" ] ||
    stop 2 "$PWD/bundle is another bundle. Nothing was changed." \
      "Give a folder of its own: sh go.sh FOLDER"
  cmp -s "$from/bundle/stage.lock" bundle/stage.lock || [ -z "$(readers)" ] ||
    stop 2 "$PWD/bundle has other data, and these jobs read it: $(echo $(readers)). Nothing was \
changed." "Let them end, or take a folder of its own: sh go.sh FOLDER"
  (cd "$from" && is_intact) || stop 1 "$from/$RUNS: a file is damaged or missing." "$rewrite"
  rm -f "bundle/$seal"
  [ ! -f .airlift/damaged ] ||
    while IFS= read -r file; do rm -f "bundle/$file"; done <.airlift/damaged
  rm -f .airlift/damaged
  # macOS writes such files beside others on a disk of another system; a bundle may have its own.
  grep -q '/\._' "$from/bundle/manifest-sha256.txt" && own= || own='._*'
  (cd "$from" && find bundle -type f ! -path "bundle/$seal" ! -name "$own" && find "bundle/$seal" "$RUNS" ${CODE:+"$CODE"} -type f &&
    say ".airlift/plan${newline}go.sh") |
    while IFS= read -r file; do
      size=$(stat -c %s "$from/$file")
      [ "${file#bundle/data/}" = "$file" ] || [ "$size" != "$(stat -c %s "$file" 2>/dev/null)" ] ||
        continue
      say "$file"
      { mkdir -p "$(dirname "$file")" && cp "$from/$file" "$file.partial" &&
        mv -f "$file.partial" "$file"; } ||
        stop 5 "$file could not be copied." "$space"
    done || exit
  find bundle -type f | while IFS= read -r file; do [ -f "$from/$file" ] || rm -f "$file"; done
  is_written . && is_intact || stop 5 "$PWD: not all bytes came from $from." "Run it again."
}
# 0: the receipt of a full reading still covers this bundle, by its own verifier's rules; 3: it
# does not; else: there is no receipt.
receipt='import json, os, runpy, sys, time
from pathlib import Path
its, lines, root = runpy.run_path("bundle/stage-verify.py"), [], Path("bundle")
known = json.loads(its["receipt_path"](its["state_folder"](os.environ), root).read_text())
for folder, _, names in os.walk("bundle/data"):
    paths = [os.path.join(folder, name) for name in names]
    lines += [its["line_of"](path[len("bundle/"):], os.lstat(path)) for path in paths]
digests = [its["sha256_of"]((root / its[name]).read_bytes()) for name in ("LOCK", "TAG_MANIFEST")]
same = digests == [sys.argv[1], known["seal"]] and known["digest"] == its["stamp_of"](lines, 0).digest
is_young = known["began"] > time.time() - its["EXPIRES_S"]
sys.exit(0 if same and is_young and known["format"] == its["RECEIPT_FORMAT"] else 3)'
is_verify() { [ -n "$python" ] && "$python" -I -c "$receipt" "$BUNDLE_ID" 2>/dev/null; }
do_verify() { if [ "$VERIFY" = job ]; then verify_in_job; else verify_here; fi; }
verify_here() {
  sleep 3 # a file that was changed in this moment would get no receipt
  { [ ! -f bundle/stage-verify.py ] || (cd bundle && grep '  stage-verify\.py$' "$seal" | sha256sum -c); } \
    >/dev/null 2>&1 || { say stage-verify.py >.airlift/damaged && stop 1 \
    "bundle/stage-verify.py is damaged." "Send the bundle again: it replaces it."; }
  [ -z "$python" ] || [ ! -f bundle/stage-verify.py ] ||
    exec nice -n 10 "$python" -I bundle/stage-verify.py --id "$BUNDLE_ID" --jobs 4 \
      --failed .airlift/damaged bundle
  say "no Python 3.6 here: sha256sum compares the bytes of all files that are listed"
  cd bundle || exit 5
  [ "$(digest <stage.lock)" = "$BUNDLE_ID" ] ||
    stop 1 "bundle: its id is not $BUNDLE_ID." "Send the bundle again."
  nice -n 10 sha256sum -c tagmanifest-sha256.txt manifest-sha256.txt >../.airlift/sums &&
    rm -f ../.airlift/damaged && return
  sed -n 's/: FAILED.*//p' ../.airlift/sums | tee ../.airlift/damaged
  stop 1 "bundle: these files are damaged or missing." "Send the bundle again: it replaces them."
}
queued() { in_setup sbatch --parsable "$@" | sed -n '$s/^\([0-9]*\).*/\1/p'; }
verify_in_job() { # in a job, which a go.sh that begins after a kill finds again
  job=
  [ ! -f .airlift/verify-job ] || read -r job <.airlift/verify-job
  if [ -z "$job" ] || { [ -z "$(in_queue "$job")" ] && [ ! -s .airlift/verify-code ]; }; then
    rm -f .airlift/verify-*
    set -- ${PARTITION:+-p "$PARTITION"} ${ACCOUNT:+-A "$ACCOUNT"} ${TIME:+-t "$TIME"} \
      -n1 -c4 -J airlift-verify -D "$PWD" -o .airlift/verify-log \
      --wrap 'sh go.sh --verify; echo $? >.airlift/verify-code'
    eval "set -- $SBATCH \"\$@\""
    job=$(queued "$@")
    # Some partitions take no job without a GPU: then it gets those of the run.
    [ -n "$job" ] || [ -z "$GPUS" ] || job=$(queued --gres="$GPUS" "$@")
    [ -n "$job" ] || stop 5 "sbatch took no job that verifies." \
      "Correct what it says, or: \`verify: login\` in clusters.yaml."
    say "$job" >.airlift/verify-job
  fi
  say "job $job verifies"
  until [ -s .airlift/verify-code ] || [ -z "$(in_queue "$job")" ]; do sleep 5; done
  sleep 5 # for a disk that shows late what a node wrote
  cat .airlift/verify-log
  read -r code <.airlift/verify-code ||
    stop 5 "job $job ended before it had verified." "Run it again: it goes on."
  rm -f .airlift/verify-*
  exit "$code"
}
is_environment() {
  [ -n "$ENVIRONMENT" ] ||
    { (in_setup sh -c 'command -v runner') </dev/null >/dev/null 2>&1; return; }
  [ -f "$prefix/.airlift/tree.txt" ] && [ "$(digest <"$prefix/.airlift/tree.txt")" = "$ENV_DIGEST" ] &&
    (in_setup "$prefix/bin/python" -c '') </dev/null >/dev/null 2>&1
}
do_environment() {
  [ -n "$ENVIRONMENT" ] || stop 2 \
    "the bundle has no environment, and there is no \`runner\` here after the lines of slurm.setup." \
    "Activate an environment that has it, in this shell, then run it again; or on the laptop: let the \
manifest bring one (stage init --profile FILE writes the entry), or name the lines in slurm.setup."
  mkdir -p envs && in_setup nice -n 10 sh "bundle/data/envs/$ENVIRONMENT/bootstrap.sh" "$prefix"
}
submitted() { cat "$OUTPUT/submitted" 2>/dev/null; } # the number that `runner submit` wrote last
is_code() { false; } # what is there already is compared, in a second
do_code() { # the project of a command; a damaged archive is sent again
  (run unpack "$CODE")
  code=$?
  [ $code -ne 1 ] || rm -f "$CODE/sent"
  return $code
}
is_check() { # whether a job of this very plan, whose digest is in the name RUNS, waits or runs
  is_intact && grep -qsF "/$RUNS/" "$OUTPUT/submit.sbatch" && set -- $(submitted) && [ $# = 1 ] &&
    case $(in_queue "$1") in '' | '?') false ;; *) job=$1 ;; esac
}
do_check() {
  is_intact || stop 1 "$PWD/$RUNS: a file is not what was submitted, or is missing." \
    "On the laptop, the same runner submit again: it sends it."
  eval "set -- $OPTIONS" && run check "$RUNS/$RUN" --bundle bundle --output "$OUTPUT" "$@"
}
is_submit() { [ "$job" != 0 ]; }
do_submit() {
  eval "set -- $OPTIONS $SUBMIT" && run submit -q "$RUNS/$RUN" --bundle bundle --output "$OUTPUT" "$@"
}
record() { say "$WALK $* $(($(date +%s) - began))" >>.airlift/steps; }
step() {
  began=$(date +%s)
  record "$1" begin 0
  if "is_$1"; then record "$1" skipped 0 && return; fi
  say "== $WALK $1" >>.airlift/log
  "do_$1" </dev/null >>.airlift/log 2>&1 &
  child=$!
  say $child >.airlift/lock/step
  wait $child
  code=$?
  rm -f .airlift/lock/step
  [ $code -le 128 ] || (stop 5 "$1 was killed here, by signal $((code - 128))." \
    "Run it again: it goes on. Where login nodes end long work: verify: job in clusters.yaml.") \
    >>.airlift/log 2>&1
  [ $code -eq 0 ] || { record "$1" failed $code && end $code; }
  record "$1" 'done' 0
}

# --- The way back.
show='for file; do
  name=$(printf %s "$file" | LC_ALL=C tr -c "A-Za-z0-9_.+=,@/-" "?")
  if [ "$name" != "$file" ]; then echo "- name $name"
  elif [ -L "$file" ] || [ ! -f "$file" ]; then echo "- link $name"
  elif [ -r "$file" ] && size=$(stat -c %s "$file") && sum=$(head -c "$size" "$file" | sha256sum)
  then echo "$size ${sum%% *} $name"
  else echo "- unreadable $name"; fi || exit
done'
list() { # RUN [--checkpoints] [PATTERN...]: its results, each run of a sweep; `- WHY NAME`: not brought
  case ${1:-} in '' | .* | */*) false ;; *) cd "$here/output/$1" 2>/dev/null ;; esac ||
    stop 2 "$here/output has no run '$1'." "There are: $(echo $(ls "$here/output" 2>/dev/null))"
  for at in '' *=*/; do
    [ -z "$at" ] || { [ ! -L "${at%/}" ] && [ -f "${at}config.yaml" ]; } || continue
    if grep -qs '^command:' "${at}config.yaml"; then list_command "$@" || return; continue; fi
    newest=none
    [ -z "${2:-}" ] || newest=$(cd "${at}checkpoints" 2>/dev/null && printf '%s\n' step-* |
      sed -n 's/^step-\([0-9]*\)$/\1/p' | sort -n | tail -n 1)
    checkpoint=checkpoints/step-$newest
    for name in metrics.jsonl report.html config.yaml environment.json model "$checkpoint"; do
      [ ! -e "$at$name" ] && [ ! -L "$at$name" ] ||
        find "$at$name" ! -type d -exec sh -c "$show" sh {} + 2>/dev/null ||
        say "- unreadable $at$name" || return # a folder
    done
  done
}
list_command() { # as `list`: the names of its files are the user's, so its Python lists them
  name=$1
  shift
  (cd "$here" && read_plan && run results "$here/output/$name/$at" "$@") >"$here/.airlift/listed.$$" || return
  # Lines of SETUP may print something before it.
  sed -n "/^== results\$/,\$ { /^== results\$/d; s|^\([^ ]* [^ ]* \)|\1$at|; p; }" "$here/.airlift/listed.$$"
  rm -f "$here/.airlift/listed.$$"
}
results() { # DISK RUN
  to=$1/results/$2
  [ -d "$here/output/$2" ] || list "$2" # ends here, with words
  mkdir -p "$to" && touch "$to/results.new" ||
    stop 5 "$1 cannot be written: the reason is above." \
      "Free space on it, or mount it writable, or take another disk; then run it again: it goes on."
  list "$2" >"$to/results.new" || stop 5 "$1 is full." "$space"
  grep -q '[ /]model/' "$to/results.new" || say "note: $2 is not finished: it has no model yet"
  while read -r size sum name; do
    [ "$size" != - ] || { say "not brought: $name ($sum)" && continue; }
    [ "$({ digest <"$to/$name"; } 2>/dev/null)" != "$sum" ] || continue
    mkdir -p "$(dirname "$to/$name")" &&
      head -c "$size" "$here/output/$2/$name" >"$to/$name.partial" && sync &&
      [ "$(digest <"$to/$name.partial")" = "$sum" ] && mv -f "$to/$name.partial" "$to/$name" ||
      stop 5 "$name could not be copied: the disk is full, or the run wrote it meanwhile." "$space"
  done <"$to/results.new"
  mv -f "$to/results.new" "$to/results.sha256" && sync &&
    say "next, on the laptop: runner pull $2 --to DISK/"
}

stop_it() {
  set -- $(owner)
  [ $# -eq 3 ] || { say "nothing is at work here" && return; }
  [ "$2" = "$(uname -n)" ] ||
    stop 5 "it is at work on $2, and this is $(uname -n)." "ssh $2 sh '$here/go.sh' --stop"
  kill "$3" && say "stopped: what it began ends, and it submits no job"
}

read_plan() {
  WALK=0 RUN='' OUTPUT='' BUNDLE_ID='' ENVIRONMENT='' ENV_DIGEST='' VERIFY='' PARTITION=''
  ACCOUNT='' TIME='' SETUP='' OPTIONS='' SUBMIT='' RUNS='' INPUTS='' CODE='' SBATCH='' GPUS=''
  . "${from:-.}/.airlift/plan"
  prefix=$PWD/envs/$ENVIRONMENT-$(printf %.16s "$ENV_DIGEST")
  [ "$VERIFY" != job ] || export XDG_STATE_HOME="$PWD/.airlift/state" # a node may have no home folder
}
main() {
  set -u
  unset CDPATH LC_ALL && LC_ALL=C
  trap '' HUP PIPE
  newline='
' seal=tagmanifest-sha256.txt from='' job=0
  rewrite="Write the disk again, on the laptop: runner submit RUN --to DISK/"
  space="Free space or quota there, then run it again: it goes on."
  here=$(cd "$(dirname "$0")" && pwd -P) || exit 5
  case ${1:-} in '' | --*) cd "$here" ;; *) (umask 022 && mkdir -p "$1") && cd "$1" && from=$here ;; esac ||
    stop 5 "${1:-$here} cannot be used: the reason is above." "Give a folder where you may write."
  [ "$from" != "$(pwd -P)" ] || from=
  [ -n "$from" ] || [ ! -f .airlift/carried ] || stop 2 \
    "$here is the carried disk: no job may run from it, and no results are in it." \
    "sh '$here/go.sh' ~/work copies all there (or to another folder that the compute nodes see), and \
goes on. Later: sh ~/work/go.sh --results '$here'"
  case ${1:-} in
    --list) shift && list "$@" && exit ;;
    --state) { [ -d .airlift/lock ] && say "$(owner) $(silence)" || say none; } && exit ;;
    --stop) stop_it && exit ;;
    --results)
      disk=$([ -n "${2:-}" ] && cd "$OLDPWD" && cd "$2" 2>/dev/null && pwd) ||
        stop 2 "DISK is no folder here: '${2:-}'." "Mount it: sh '$here/go.sh' --results DISK [RUN]"
      read_plan && results "$disk" "${3:-${OUTPUT##*/}}" && exit
      ;;
    --runner) read_plan && shift && run "$@" ;;
    --verify) read_plan && find_python && verify_here && exit ;;
    --is-verified) read_plan && find_python && is_verify && exit ;;
    --*) stop 2 "there is no option $1." "sed -n 2,10p '$here/go.sh' names all." ;;
  esac || exit
  take_lock
  trap 'kill $! 2>/dev/null; end 5' INT TERM
  find_python
  [ -z "$from" ] || step copy
  for name in verify environment ${CODE:+code} check; do step "$name"; done
  is_verify
  [ $? -ne 3 ] || step verify # a file changed since
  before=$(submitted)
  step submit
  [ "$(submitted)" = "$before" ] || job=$(submitted)
  end 0
}
main "$@"
