"""`scripts/gpu-check`: everything about GPUs that no CPU test can show, as one resumable record.

`__main__` runs the items in order and ends within its minutes; `record` keeps their results. `node`
has the first items: `facts` asks the driver and the kernel, `ceilings` measures with torch. Then
`materials` makes a bundle with random weights, `training` measures memory and speed, `trainer_peer`
is transformers' Trainer on the same tokens, `several` needs two GPUs, `suite` runs tests/gpu.
"""
