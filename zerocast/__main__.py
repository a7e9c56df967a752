"""``python -m zerocast``: see :mod:`zerocast.cli`."""

import sys

from zerocast.cli import main

if __name__ == "__main__":
    sys.exit(main())
