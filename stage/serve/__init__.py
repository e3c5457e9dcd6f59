"""A bundle as a read-only Hub, package index and conda channel on one port, for clients that know nothing of bundles.

`catalogue` lays out once what the lock names; `hub` and `packages` are pure: request -> `Answer`; `server` is the only
room with a socket. An address is looked up in the catalogue and never joined to a path, so none leads out of a bundle.
"""
