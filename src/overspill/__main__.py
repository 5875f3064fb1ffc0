"""`python -m overspill` is the command line."""

import sys

from overspill.cli.main import app

if __name__ == "__main__":
    sys.exit(app())
