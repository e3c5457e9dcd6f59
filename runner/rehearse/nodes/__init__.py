"""`runner rehearse --job`: what only the nodes of a partition can show, in a job of five minutes.

`job` submits it and collects what the nodes wrote. On the nodes, `part` is the job's launcher and
its ranks: `look` looks at one node, `kernels` lets each of its GPUs compute, `ports` tries the way
between each two, `bandwidth` lets all ranks add up once. `runner.preflight.rehearsed` keeps the
result for `runner check`.
"""
