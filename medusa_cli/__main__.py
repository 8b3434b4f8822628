"""`python -m medusa_cli`: the same program as `medusa`, whatever else of that name is on the PATH."""

import sys

from medusa_cli.cli.app import main

if __name__ == "__main__":
    sys.exit(main())
