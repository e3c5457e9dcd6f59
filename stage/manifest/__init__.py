"""The manifest: the YAML file that lists the assets of a bundle."""
