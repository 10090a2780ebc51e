from ipucnn.api import evaluate as evaluate
from ipucnn.api import export as export
from ipucnn.api import load as load
from ipucnn.api import plan as plan
from ipucnn.api import read_history as read_history
from ipucnn.api import train as train

__version__: str
