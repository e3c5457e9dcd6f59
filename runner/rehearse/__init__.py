"""`runner rehearse`: a run from its first step to its exported model, small, before the queue.

`rehearsal` is the command on a login node or laptop: two ranks on the CPU, with the model cut to
two layers. `job` is `--job`: what only the nodes of a partition can show.
"""
