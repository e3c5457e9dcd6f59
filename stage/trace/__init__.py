"""`stage trace`: runs a script once, records what it asks for, and writes the manifest for it.

`recorder` is the Hub and the proxy of the script, and passes on each request; `record` says what a
request asked for; `entries` turns that into entries of a manifest; `trace` is the run itself.
"""
