"""Measures `stage` beside the tools people use today. `scripts/bench` is the command.

workloads (`fetching`, `verifying`) -> candidates -> rounds of samples (`measure`) -> ratios (`arithmetic`) -> table,
targets and plot (`report`, `plot`).
"""
