"""The subcommands, one file each; :mod:`snapstream.cli` collects them."""
