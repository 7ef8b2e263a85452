"""The methods of choosing tokens, one file each; :mod:`snapstream.config.policy` knows them by name."""
