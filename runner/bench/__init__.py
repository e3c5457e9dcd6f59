"""`runner bench`: the largest micro batch that fits and its speed, for each way to spread a model.

A run file -> `strategies` (what is compared) -> `search` (which micro batch is next; pure) ->
`trial` (one try: real ranks and real steps in their own processes, so that running out of memory
ends only the trial) -> `table` (text, Markdown, SVG). As with `runner train`, one command is the
bench, the launcher of a trial, and a rank.
"""
