"""A conda channel in a folder, made of this Python and of wheels."""
