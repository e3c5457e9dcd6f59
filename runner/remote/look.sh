# What is in a cluster's folder: sh look.sh FOLDER ENVIRONMENT OUTPUT RUNS INPUTS CODE   (as in the plan)
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
[ -n "$2" ] && answer airlift "$("$2/bin/python3" -c 'import stage; print(stage.__version__)' 2>/dev/null)"
grep -qsF "/$4/" "$3/submit.sbatch" && answer made yes
(cd "$4" && printf '%s\n' "$5" | sha256sum -c) >/dev/null 2>&1 && answer intact yes
[ -n "$6" ] && [ -f "$6/sent" ] && answer code yes
[ -n "$6" ] && answer near "$(ls -t "${6%/*}" 2>/dev/null | head -n 1)"
squeue -h -u "$(id -un)" -o 'job=%A|%T|%o' || answer noqueue yes
exit 0
