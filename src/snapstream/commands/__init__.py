"""The commands, one file each; :mod:`snapstream.cli` collects them."""
