"""``python -m snapstream``: the ``snapstream`` command."""

from snapstream.cli import main

main()
