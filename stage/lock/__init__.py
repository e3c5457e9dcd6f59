"""The manifest, its requests, the lock, licences; the readers of YAML and JSON; the SBOM."""
