"""From text to tokens, once, outside the ranks; and the memory-mapped store that the ranks read."""
