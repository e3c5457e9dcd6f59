# Source it:  . @PREFIX@/activate      Undo it:  airlift_deactivate
# For sh, dash and bash. Needs no conda; runs the activate.d scripts that conda packages bring, as conda does.

if [ "${AIRLIFT_PREFIX:-}" != '@PREFIX@' ]; then
  if [ -n "${AIRLIFT_PREFIX:-}" ] && command -v airlift_deactivate >/dev/null 2>&1; then airlift_deactivate; fi
  AIRLIFT_OLD_PATH=${PATH-} AIRLIFT_OLD_CONDA_PREFIX=${CONDA_PREFIX-}
  AIRLIFT_PREFIX='@PREFIX@' CONDA_PREFIX='@PREFIX@'
  PATH="@PREFIX@/bin${PATH:+:$PATH}"
  export AIRLIFT_PREFIX CONDA_PREFIX PATH
  unset PYTHONHOME

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
    unset AIRLIFT_PREFIX AIRLIFT_OLD_PATH AIRLIFT_OLD_CONDA_PREFIX
    unset -f airlift_source_all airlift_deactivate
    hash -r 2>/dev/null || :
  }

  airlift_source_all "$AIRLIFT_PREFIX/etc/conda/activate.d"
  hash -r 2>/dev/null || :
fi
