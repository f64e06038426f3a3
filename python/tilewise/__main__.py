"""`python -m tilewise` is the `tilewise` command."""

import sys

from tilewise.cli.main import main

sys.exit(main())
