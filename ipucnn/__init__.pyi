from ipucnn.api import load as load
from ipucnn.api import plan as plan
from ipucnn.api import read_history as read_history
from ipucnn.api import train as train

__version__: str
