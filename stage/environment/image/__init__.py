"""An environment as a folder: packages linked into it, relocated, packed into one file."""
