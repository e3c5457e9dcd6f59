"""A task of one's own: its code in the bundle, and the store of what it makes of the rows."""
