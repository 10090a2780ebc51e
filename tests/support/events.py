"""A view that keeps the events it gets."""

from ipucnn.events import View


class Recorded(View):
    """Keeps all events, and whether the work was left."""

    def __init__(self):
        self.events, self.is_left = [], False

    def show(self, event):
        self.events.append(event)

    def __exit__(self, *_):
        self.is_left = True
