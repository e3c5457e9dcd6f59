"""`runner bench`: the largest micro batch that fits, and how fast it is, for each way to spread the model.

A run file -> `strategies` (what is tried) -> `search` (which micro batch next; pure) -> `trial` (one try: real ranks
that make real steps, in processes of their own, so that running out of memory ends the try and nothing else) ->
`table` (text, Markdown, SVG). The same command is bench, launcher of one trial, and rank, as `runner train` is.
"""
