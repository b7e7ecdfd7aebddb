"""``python -m enginewire``: the command line."""

import sys

from enginewire.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
