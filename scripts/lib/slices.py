"""Parts of the test suite: `python -m scripts.lib.slices NAME` prints the files of one.

- `quick`: a first answer in two minutes: rules and formats of each folder, a fetch, a verification.
  It needs no Slurm site and, besides git and rsync, no system package.
- `fixtures`: each fixture that test files share, for another build of Python.
- `smoke`: without torch: the commands of a laptop and a login node, for any Python.
"""

from __future__ import annotations

import sys

SLICES: dict[str, tuple[str, ...]] = {
    "quick": (
        "tests/hub/test_demo_parts.py",
        "tests/runner/training/components/test_batches.py",
        "tests/runner/config/test_run_config.py",
        "tests/runner/config/test_deepspeed.py",
        "tests/runner/data/test_packing.py",
        "tests/runner/plan/test_plan.py",
        "tests/runner/preflight/test_preflight.py",
        "tests/runner/training/components/test_optimization.py",
        "tests/runner/slurm/test_script.py",
        "tests/stage/bundle/test_bundle.py",
        "tests/stage/environment/spec/test_environment_yml.py",
        "tests/stage/fetch/test_fetch_bundle.py",
        "tests/stage/lock/test_lock.py",
        "tests/stage/manifest/test_manifest.py",
        "tests/stage/util/test_paths.py",
        "tests/stage/verify/test_damage.py",
        "tests/test_quickstart.py",
        "tests/test_slices.py",
    ),
    "fixtures": (
        "tests/site/test_exec_on_slurm.py",
        "tests/stage/environment/solve/test_conda_channel.py",
        "tests/stage/fetch/test_fetch_bundle.py",
        "tests/stage/fetch/test_fetch_refusals.py",
        "tests/stage/fetch/test_store.py",
        "tests/stage/hub/test_class_names.py",
        "tests/stage/util/test_signals.py",
        "tests/runner/launch/test_local.py",
        "tests/runner/test_offline.py",
        "tests/runner/training/saving/test_model_card.py",
        "tests/runner/training/test_no_waiting.py",
    ),
    "smoke": (
        "tests/stage/bundle/test_bundle.py",
        "tests/stage/cli/test_cli.py",
        "tests/stage/environment/solve/test_conda_channel.py",
        "tests/stage/environment/spec/test_environment_yml.py",
        "tests/stage/fetch/test_fetch_bundle.py",
        "tests/stage/manifest/test_manifest.py",
        "tests/stage/util/test_signals.py",
        "tests/stage/verify/test_damage.py",
        "tests/stage/util/test_processes.py",
    ),
}

if __name__ == "__main__":
    print(*SLICES[sys.argv[1]], sep="\n")
