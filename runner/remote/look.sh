# What is in a cluster's folder: sh look.sh FOLDER ENVIRONMENT FILE...   (the files in runs/ that a run needs)
# Prints `name=value` lines; writes nothing.

answer() { printf '%s=%s\n' "$1" "$2"; }
digest() { sha256sum 2>/dev/null | cut -c1-64; }

# sbatch is only in a login shell's PATH at some sites; a greeting stands before the last line.
command -v sbatch >/dev/null 2>&1 ||
  PATH=$PATH:$(bash -lc 'printf "\n%s" "$PATH"' 2>/dev/null </dev/null | tail -n 1)
command -v sbatch >/dev/null 2>&1 && answer slurm yes
cd "$1" 2>/dev/null || exit 0
answer folder "$(pwd -P)"
[ -f bundle/tagmanifest-sha256.txt ] && [ ! -s .airlift/damaged ] && answer bundle_id "$(digest <bundle/stage.lock)"
[ -f bundle/stage.lock ] && answer lock_id "$(digest <bundle/stage.lock)"
# Its keys are sorted, and `name` is the last.
answer name "$(tail -n 2 bundle/stage.lock 2>/dev/null | sed -n 's/^ *"name": "\(.*\)"$/\1/p')"
answer kib "$(du -sk bundle 2>/dev/null | cut -f1)"
[ -f .airlift/plan ] && answer plan "$(sed 1d .airlift/plan | digest)"
[ -f .airlift/result ] && answer result "$(sed 1q .airlift/plan) $(cat .airlift/result)"
[ -n "$2" ] && answer airlift "$("$2/bin/python3" -c 'import stage; print(stage.__version__)' 2>/dev/null)"
shift 2
[ -f "runs/$1" ] && answer run_digest "$(cd runs && cat -- "$@" 2>/dev/null | digest)"
answer readers "$(grep -lsF "runs/$1" output/*/submit.sbatch | tr '\n' ' ')" # of jobs that were, too
squeue -h -u "$(id -un)" -o 'job=%A|%T|%o' || answer noqueue yes
exit 0
