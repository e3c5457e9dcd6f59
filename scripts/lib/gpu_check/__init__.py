"""`scripts/gpu-check`: everything about GPUs that no CPU test can show, as one resumable record.

`__main__` runs the items in order and ends within its minutes; `record` keeps their results.
`device` asks the driver and torch; tests/gpu runs; `materials` makes a bundle with random weights,
`training` runs `runner bench` and transformers' Trainer on it; `several` needs two GPUs.
"""
