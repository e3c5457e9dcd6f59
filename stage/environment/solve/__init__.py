"""From environment.yml to the list of all packages. This folder uses the network."""
