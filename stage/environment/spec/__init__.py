"""The files of an environment: environment.yml, conda-lock.yml, profiles."""
