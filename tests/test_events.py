"""The loop over events: what a view gets, in which order, and what an interruption does."""

import pytest
from support.events import Recorded

from ipucnn.events import Began, Note, Progress, emit, show


def counting(total):
    for done in range(1, total + 1):
        emit(Note(f"deep inside {done}"))
        yield Progress("counting", done, total)
    return total * 10


def test_the_view_gets_all_events_in_order_and_the_result_is_returned():
    view = Recorded()
    assert show(counting(2), view) == 20
    assert view.events == [
        Note("deep inside 1"),
        Progress("counting", 1, 2),
        Note("deep inside 2"),
        Progress("counting", 2, 2),
    ]
    assert view.is_left
    emit(Note("nobody listens"))
    assert len(view.events) == 4
    assert show(counting(3)) == 30


def test_work_within_work_has_a_view_of_its_own():
    outer, inner = Recorded(), Recorded()

    def nested():
        yield Began("outer")
        show(counting(1), inner)
        emit(Note("outer again"))

    show(nested(), outer)
    assert outer.events == [Began("outer"), Note("outer again")] and len(inner.events) == 2


class Signalled(Recorded):
    """A signal arrives while the second event is shown."""

    def show(self, event):
        super().show(event)
        if len(self.events) == 2:
            raise KeyboardInterrupt


@pytest.mark.parametrize("keeps", [True, False])
def test_an_interruption_while_an_event_is_shown_is_raised_in_the_work(keeps):
    seen = []

    def work():
        for done in range(5):
            try:
                yield Progress("work", done, 5)
            except KeyboardInterrupt:
                seen.append(done)
                if not keeps:
                    raise
                return done
        return None

    view = Signalled()
    if keeps:
        assert show(work(), view) == 1
    else:
        with pytest.raises(KeyboardInterrupt):
            show(work(), view)
    assert seen == [1] and view.is_left


def test_an_error_of_the_work_leaves_the_view():
    def work():
        yield Note("before")
        raise ValueError("broken")

    view = Recorded()
    with pytest.raises(ValueError, match="broken"):
        show(work(), view)
    assert view.is_left


def test_the_end_of_an_iterator_in_a_view_does_not_end_the_work():
    class Faulty(Recorded):
        def show(self, event):
            next(iter(()))

    view = Faulty()
    work = (Note(str(number)) for number in range(2))
    with pytest.raises(StopIteration):
        show(work, view)
    assert view.is_left


def test_a_second_interruption_while_an_event_is_shown_is_raised_in_the_work_too():
    seen = []

    def work():
        while len(seen) < 2:
            try:
                yield Note("still there")
            except KeyboardInterrupt:
                seen.append("interrupted")
        return "saved"

    class Impatient(Recorded):
        def show(self, event):
            raise KeyboardInterrupt

    assert show(work(), Impatient()) == "saved"
