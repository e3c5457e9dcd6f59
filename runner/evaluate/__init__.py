"""`runner evaluate`: the measures of a checkpoint, or of the first weights; nothing is trained."""
