"""``python -m replayssm.cli``: the command without an installed script."""

from . import main

main()
