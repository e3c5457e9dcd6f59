"""A bundle as a read-only Hub, for unchanged clients; and `stage trace`, which records a Hub.

`catalogue` lists what the lock names; `hub_api` is pure: request -> `Answer`; only `server` has a
socket. An address is looked up in the catalogue and never joined to a path, so no address leads out
of the bundle. `trace` is such a server that asks the real Hub, and turns what it saw into entries
of a manifest; `children` lets all processes of a script ask that Hub.
"""
