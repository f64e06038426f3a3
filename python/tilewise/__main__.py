"""`python -m tilewise` runs the `tilewise` command."""

import sys

from tilewise.cli.command import main

sys.exit(main())
