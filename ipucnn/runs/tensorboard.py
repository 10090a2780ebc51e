"""TensorBoard event files: scalars only, written with TensorFlow's record writer (no TensorBoard needed)."""

import os
import socket
import time
from pathlib import Path
from typing import Dict

from ipucnn.errors import DataError
from ipucnn.filesystem import make_folder, make_new_file


class EventWriter:
    """One event file in ``folder``; usable once TensorFlow may be imported.

    Args:
        folder: of the event files.
        first_step: where a run is continued; TensorBoard drops what earlier files have from there on.
    """

    def __init__(self, folder: Path, first_step: int = 0) -> None:
        import tensorflow as tf

        make_folder(folder, "TensorBoard folder", "choose another --run-dir")
        now = time.time()
        name = f"events.out.tfevents.{int(now)}.{socket.gethostname()}.{os.getpid()}"
        self._writer = tf.io.TFRecordWriter(str(make_new_file(folder, name)))
        self._event = tf.compat.v1.Event
        # The first record names the format's version; TensorBoard refuses a file without it.
        self._write(self._event(wall_time=now, file_version="brain.Event:2"))
        log = tf.compat.v1.SessionLog(status=tf.compat.v1.SessionLog.START)
        self._write(self._event(wall_time=now, step=first_step, session_log=log))

    def _write(self, event: object) -> None:
        import tensorflow as tf

        try:
            self._writer.write(event.SerializeToString())  # type: ignore[attr-defined]
            self._writer.flush()
        except tf.errors.OpError as error:
            raise DataError(
                f"TensorBoard events cannot be written: {error.message}", "free some space"
            ) from None

    def scalars(self, step: int, values: Dict[str, float]) -> None:
        """Adds one point to each named curve."""
        import tensorflow as tf

        points = [tf.compat.v1.Summary.Value(tag=tag, simple_value=float(v)) for tag, v in values.items()]
        self._write(self._event(wall_time=time.time(), step=step, summary=tf.compat.v1.Summary(value=points)))

    def close(self) -> None:
        """Ends the file."""
        self._writer.close()
