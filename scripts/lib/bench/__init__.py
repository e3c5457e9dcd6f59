"""Measures `stage` and `runner` beside other tools. `scripts/bench` is the command.

workloads (`fetching`, `verifying`, `training`) -> candidates -> rounds of samples, ratios and a
table (`workload`). `operations` counts what ranks ask of a file system.
"""
