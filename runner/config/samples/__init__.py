"""How the rows of a dataset become samples: what a run file says about it."""
