"""Measures `stage` beside other tools. `scripts/bench` is the command.

workloads (`fetching`, `verifying`, `environments`) -> candidates -> rounds of samples (`measure`)
-> ratios (`arithmetic`) -> table, targets and plot (`report`, `plot`).
"""
