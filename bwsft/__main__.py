"""`python -m bwsft`."""

import sys

from bwsft.cli import main

sys.exit(main())
