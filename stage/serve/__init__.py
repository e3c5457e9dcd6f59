"""A bundle as a read-only Hub, for unchanged clients.

`catalogue` lists what the lock names; `hub` is pure: request -> `Answer`; only `server` has a
socket. An address is looked up in the catalogue and never joined to a path, so no
address leads out of the bundle.
"""
