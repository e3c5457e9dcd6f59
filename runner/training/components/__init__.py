"""Parts of the training loop that do not depend on engines."""
