"""`python -m hf_dcsgd.cli`, the same as `hf-dcsgd`."""

import sys

from hf_dcsgd.cli import main

sys.exit(main())
