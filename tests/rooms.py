"""The tests of each room import what they share, and each other, by name."""

import sys
from pathlib import Path

sys.path += sorted({str(each.parent) for each in Path(__file__).parent.glob("*/test_*.py")})
