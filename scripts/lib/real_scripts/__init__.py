"""Real scripts that nobody here wrote, run unchanged from a bundle: `scripts/real-scripts`.

`list.yaml` names them, each at a commit; `scripts` reads that list; `sources` takes their files
from git; `twins` makes tiny models and datasets under the names that they use; `environment` is the
Python that they run in; `road` traces, stages and runs one. tests/real_scripts walks the roads.
"""
