"""Whatever of an environment needs the network: `environment.yml` and a profile -> `conda-lock.yml`.

The conda half is solved by conda-lock (`conda`), with the user's own conda or py-rattler behind it (`lookalike`); what
is inside the solved packages is looked at (`contents`); the pip half is resolved by uv (`pip`, `indexes`) around it;
what would not run on the cluster is refused (`lock`). Every tool is a subprocess.
"""
