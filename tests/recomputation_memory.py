"""``recomputation_memory.py on|off`` prints the MiB that one weight update of cifar_resnet56 in four stages takes."""

import re
import sys
from pathlib import Path

from ipucnn.config.options import RunConfig
from ipucnn.models.registry import get_model
from ipucnn.sessions.factory import create_session
from ipucnn.training.program import BuiltProgram, Layers, make_program


def peak_mib(recomputation: bool) -> float:
    """Returns the process's peak memory beyond the memory before the weight update, in MiB."""
    config = RunConfig(
        micro_batch_size=32,
        gradient_accumulation_count=16,
        validation=False,
        ipus_per_replica=4,
        pipeline_splits=("auto",),
        recomputation=recomputation,
    )
    session = create_session("cpu", config=config)
    import tensorflow as tf
    from support.sessions import constant, make_trainer

    from ipucnn.models.build import BuildOptions, build_model

    model = build_model(get_model("cifar_resnet56"), BuildOptions((32, 32, 3), 10, seed=1))
    blocks = [layer.name for layer in model.layers if type(layer).__name__ == "Add"]
    splits = [blocks[len(blocks) * i // 4] for i in range(1, 4)]
    layers = Layers(tuple(splits), "given", ())
    program = BuiltProgram.of(make_program(config, 10**6, seed=0), layers, 0)
    trainer = make_trainer(session, model, program, ("sgd", {}, {}), constant(1e-3))
    size = trainer.division.samples_per_group
    images, labels = tf.zeros([size, 32, 32, 3]), tf.zeros([size], tf.int32)
    batches = trainer.feed(tf.data.Dataset.from_tensors((images, labels)).repeat())
    before = _peak_kib()
    trainer.run(batches, 1)
    return (_peak_kib() - before) / 1024


def _peak_kib() -> int:
    """The peak since the program began; that of ``getrusage`` begins with the memory of the process that started it."""
    status = Path("/proc/self/status").read_text(encoding="utf-8")
    return int(re.findall(r"VmHWM:\s*(\d+) kB", status)[0])


if __name__ == "__main__":
    print(peak_mib(sys.argv[1] == "on"))
