# Source it:  . @PREFIX@/activate      Undo it:  airlift_deactivate
# For sh, dash and bash. Needs no conda; runs the activate.d scripts that conda packages bring, as conda does.

# Only bash says where this file lies. The last command of this `if` is what `.` returns.
# shellcheck disable=SC3013,SC3028,SC2128
if [ ! -f '@PREFIX@/activate' ] || {
  [ -n "${BASH_SOURCE-}" ] && [ -d "${BASH_SOURCE%/*}/.airlift" ] && [ ! "$BASH_SOURCE" -ef '@PREFIX@/activate' ]
}; then
  printf '%s\n' 'This environment was made for @PREFIX@, and cannot be moved. Create it again at the new place.' >&2
  false
elif [ ! -x '@PREFIX@/bin/python3' ]; then
  printf '%s\n' "The site's Python has gone: $(readlink '@PREFIX@/bin/python3'), which is that of @PREFIX@." >&2
  printf '  -> %s\n' "Load the module that it was made on; or remove @PREFIX@ and run bootstrap.sh again." >&2
  false
elif [ "${AIRLIFT_PREFIX:-}" != '@PREFIX@' ]; then
  if [ -n "${AIRLIFT_PREFIX:-}" ] && command -v airlift_deactivate >/dev/null 2>&1; then airlift_deactivate; fi
  AIRLIFT_OLD_PATH=${PATH-} AIRLIFT_OLD_CONDA_PREFIX=${CONDA_PREFIX-}
  AIRLIFT_OLD_PYTHONPATH=${PYTHONPATH-} AIRLIFT_OLD_PYTHONNOUSERSITE=${PYTHONNOUSERSITE-}
  if [ -n "${PYTHONPATH-}" ]; then
    airlift_has="has its own packages"
    if [ -f '@PREFIX@/.airlift/site' ]; then airlift_has="finds the site's torch without it"; fi
    printf '%s\n' "PYTHONPATH is unset here: this environment $airlift_has. It was: $PYTHONPATH" >&2
    unset airlift_has
  fi
  AIRLIFT_PREFIX='@PREFIX@' CONDA_PREFIX='@PREFIX@'
  PATH="@PREFIX@/bin${PATH:+:$PATH}"
  PYTHONNOUSERSITE=1 # packages of `pip install --user` would be imported before those of this environment
  export AIRLIFT_PREFIX CONDA_PREFIX PATH PYTHONNOUSERSITE
  unset PYTHONHOME PYTHONPATH

  airlift_source_all() {
    case $- in *u*) airlift_nounset=1; set +u ;; *) airlift_nounset= ;; esac
    for airlift_script in "$1"/*.sh; do
      if [ -r "$airlift_script" ]; then . "$airlift_script"; fi
    done
    if [ -n "$airlift_nounset" ]; then set -u; fi
    unset airlift_script airlift_nounset
  }

  airlift_deactivate() {
    airlift_source_all "$AIRLIFT_PREFIX/etc/conda/deactivate.d"
    PATH=$AIRLIFT_OLD_PATH
    if [ -n "$AIRLIFT_OLD_CONDA_PREFIX" ]; then CONDA_PREFIX=$AIRLIFT_OLD_CONDA_PREFIX; else unset CONDA_PREFIX; fi
    if [ -n "$AIRLIFT_OLD_PYTHONPATH" ]; then export PYTHONPATH="$AIRLIFT_OLD_PYTHONPATH"; fi
    PYTHONNOUSERSITE=$AIRLIFT_OLD_PYTHONNOUSERSITE
    if [ -z "$PYTHONNOUSERSITE" ]; then unset PYTHONNOUSERSITE; fi
    unset AIRLIFT_PREFIX AIRLIFT_OLD_PATH AIRLIFT_OLD_CONDA_PREFIX AIRLIFT_OLD_PYTHONPATH AIRLIFT_OLD_PYTHONNOUSERSITE
    unset -f airlift_source_all airlift_deactivate
    hash -r 2>/dev/null || :
  }

  airlift_source_all "$AIRLIFT_PREFIX/etc/conda/activate.d"
  hash -r 2>/dev/null || :
fi
