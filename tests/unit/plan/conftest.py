import sys
from pathlib import Path

# The builders and the fake cluster of these tests lie beside them.
sys.path.insert(0, str(Path(__file__).parent))
