"""``python -m ferroce``: the program ``ferroce``."""

import os
import sys

from .hosts import program

os.execv(program(), ["ferroce", *sys.argv[1:]])
