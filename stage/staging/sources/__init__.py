"""Where assets come from: repositories of a Hub, files of this machine, addresses, environments."""
