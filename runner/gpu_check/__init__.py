"""What a node's devices are and can do, measured in a minute: `runner check --on node`.

`facts` asks the driver and the kernel. `ceilings` measures, in a child process with torch, how fast
matrices are multiplied and memory is copied. `record` keeps the results. `scripts/gpu-check` begins
with these items and adds tests, memory and training speed.
"""
