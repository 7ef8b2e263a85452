"""``python -m snapstream`` runs the ``snapstream`` command."""

from snapstream.cli import main

main()
