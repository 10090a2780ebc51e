"""Compares the images per second of the host session in training with Keras ``fit`` and PyTorch, in turns.

    python benchmarks/host_session.py [--against keras torch REVISION] [--rounds 7] [--only NETWORK]
        [--micro-batch 8] [--csv FILE] [--again]

For each row of ``CASES`` every side has a process of its own, and only one computes at a time:

  session         the host session
  keras           Keras' fit with the same micro-batch and gradient accumulation
  keras, fused    Keras' fit with one batch as large as the group of micro-batches that the session fuses
  torch           PyTorch, channels_last, the global batch in one step; networks are timm's, except U-Net and
                  cifar_resnet8, which are written out below
  torch compiled  the same through torch.compile
  REVISION        the host session of another revision of this repository

TensorFlow has oneDNN's operations everywhere; PyTorch has as many threads as there are cores.  The table has medians
over the rounds and, for the ratios, medians of the ratios within a round with their 95 % intervals (of the sign test,
from 6 rounds on): by the clock, and by processor time, which other programs disturb less.  "2x8" is two groups of 8
fused micro-batches in parallel.  The share of the peak divides the session's multiplications and additions per second
(three forward passes) by those of the fastest large matrix product on the machine.  Memory is the peak of the session's
process.

Rows are kept as soon as they are measured: after a stop the same command goes on with the next one.

PyTorch: ``pip install torch torchvision timm``; a side that cannot be imported is left out, with a message.
"""

import argparse
import importlib.util
import io
import os
import statistics
import subprocess
import sys
import tarfile
import tempfile
import time
from pathlib import Path
from typing import Any, Dict, List, NamedTuple, Optional, Tuple

from measuring import KEPT, ROOT, Journal, Median, Provenance, add_again, git, median, start, write_rows

CLASSES = 10
ROUND_S = 2.5


class Case(NamedTuple):
    """A network and its batches.

    Attributes:
        size: height and width of the images, which have three channels (U-Net: one).
        micro_batch: samples; a network has group norm if it is 1, because batch norm needs more.
        global_batch: samples of a weight update.
    """

    network: str
    size: int
    micro_batch: int
    global_batch: int

    @property
    def channels(self) -> int:
        return 1 if self.network == "unet" else 3

    @property
    def norm(self) -> str:
        return "none" if self.network == "unet" else "group" if self.micro_batch == 1 else "batch"


CASES = (
    *(
        Case(name, 32, size, 16 * size)
        for name in ("efficientnet-b0", "cifar_resnet8")
        for size in (1, 8, 64)
    ),
    Case("efficientnet-b0", 32, 32, 128),
    Case("mobilenetv2", 96, 8, 32),
    Case("resnet50", 96, 8, 32),
    Case("unet", 252, 1, 8),
)
UNET_FILTERS = 16
TIMM = {"efficientnet-b0": "efficientnet_b0", "mobilenetv2": "mobilenetv2_100", "resnet50": "resnet50"}


def build(case: Case, norm: Optional[str] = None) -> Any:
    """Builds the Keras model."""
    from ipucnn.models.build import BuildOptions, build_model
    from ipucnn.models.registry import get_model

    filters = UNET_FILTERS if case.network == "unet" else None
    shape = (case.size, case.size, case.channels)
    options = BuildOptions(shape, CLASSES, norm=norm or case.norm, base_filters=filters, seed=1)
    return build_model(get_model(case.network), options)


def random_arrays(case: Case, output_size: int) -> Tuple[Any, Any]:
    """Makes images and labels (of each pixel for U-Net)."""
    import numpy as np

    rng, count = np.random.default_rng(0), max(2 * case.global_batch, 64)
    shape = (count, output_size, output_size) if case.network == "unet" else (count,)
    images = rng.normal(size=(count, case.size, case.size, case.channels)).astype("float32")
    return images, rng.integers(0, CLASSES, shape).astype("int32")


def random_data(case: Case, model: Any, batch: int) -> Any:
    import tensorflow as tf

    pairs = tf.data.Dataset.from_tensor_slices(random_arrays(case, model.output_shape[1]))
    return pairs.repeat().batch(batch, drop_remainder=True).prefetch(2)


class SessionSide:
    """Trains with the host session."""

    def __init__(self, case: Case) -> None:
        import dataclasses

        import numpy as np

        from ipucnn.config.options import RunConfig
        from ipucnn.machine import fix_threads
        from ipucnn.sessions.factory import create_session
        from ipucnn.sessions.host.division import threads_of_training
        from ipucnn.sessions.session import TrainingTask
        from ipucnn.training.losses import Loss
        from ipucnn.training.optimizer_settings import make_settings
        from ipucnn.training.program import BuiltProgram, Layers, make_program

        config = dataclasses.replace(
            RunConfig(),
            micro_batch_size=case.micro_batch,
            gradient_accumulation_count=case.global_batch // case.micro_batch,
            validation=False,
        )
        program = make_program(config, case.global_batch * 1000, seed=0)
        fix_threads(threads_of_training(program, None, config.max_workers))
        session = create_session("cpu", trains=True)
        model = build(case)
        optimizer = make_settings("sgd", {"momentum": 0.9}, global_batch_size=program.global_batch_size)
        division = session.divide(model, program)
        task = TrainingTask(
            model,
            BuiltProgram.of(program, Layers((), "", ()), division.fused_micro_batches),
            division,
            optimizer,
            Loss("cross_entropy"),
            lambda updates: np.full(np.shape(updates), 1e-3, np.float32),
        )
        self.trainer = trainer = session.trainer(task)
        self.batches = trainer.feed(random_data(case, model, division.samples_per_group))
        self.fused, self.side_by_side = division.fused_micro_batches, division.num_lanes
        self.model = model

    def run(self, updates: int) -> None:
        self.trainer.run(self.batches, updates)

    def facts(self) -> Tuple[float, float]:
        """Returns the share of the machine's peak at one image per second, and the process's peak memory in MiB."""
        from ipucnn.benchmarking.peak import MatmulPeak
        from ipucnn.machine import peak_memory_bytes
        from ipucnn.models.counts import count_macs

        memory = peak_memory_bytes() or 0
        return 6 * count_macs(self.model) / MatmulPeak().measure().flop_per_s, memory / 2**20


class KerasSide:
    """Trains with Keras' fit; ``fused`` micro-batches are one batch."""

    def __init__(self, case: Case, fused: int) -> None:
        # Not imported as the session does, which switches oneDNN on.
        from tensorflow import keras

        from ipucnn.benchmarking.contenders import stock_copy

        batch = case.micro_batch * fused
        self.model = stock_copy(build(case))
        self.steps = case.global_batch // batch
        self.model.compile(
            keras.optimizers.SGD(
                1e-3, momentum=0.9, gradient_accumulation_steps=self.steps if self.steps > 1 else None
            ),
            keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        )
        self.data = random_data(case, self.model, batch)

    def run(self, updates: int) -> None:
        self.model.fit(self.data, epochs=1, steps_per_epoch=updates * self.steps, verbose=0)


class TorchSide:
    """Trains with PyTorch: the global batch in one step."""

    def __init__(self, case: Case, is_compiled: bool) -> None:
        import torch

        torch.manual_seed(0)
        torch.set_num_threads(os.cpu_count() or 1)
        model = torch_network(case).to(memory_format=torch.channels_last).train()
        with torch.no_grad():
            probe = model(torch.zeros(2, case.channels, case.size, case.size))
        arrays = random_arrays(case, probe.shape[-1])
        self.images = torch.from_numpy(arrays[0].transpose(0, 3, 1, 2))
        self.images = self.images.contiguous(memory_format=torch.channels_last)
        self.labels = torch.from_numpy(arrays[1].astype("int64"))
        self.optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
        self.model = torch.compile(model) if is_compiled else model
        self.loss, self.batch, self.position = torch.nn.CrossEntropyLoss(), case.global_batch, 0

    def run(self, updates: int) -> None:
        for _ in range(updates):
            if self.position + self.batch > len(self.images):
                self.position = 0
            part = slice(self.position, self.position + self.batch)
            self.position += self.batch
            self.optimizer.zero_grad(set_to_none=True)
            loss = self.loss(self.model(self.images[part]), self.labels[part])
            loss.backward()
            self.optimizer.step()
        loss.item()


def torch_network(case: Case) -> Any:
    """Returns timm's network, or one written out like the original."""
    from torch import nn

    if case.network in TIMM:
        import timm

        model = timm.create_model(TIMM[case.network], num_classes=CLASSES)
        if case.norm == "group":
            _with_group_norm(model)
        return model
    if case.network == "unet":
        return _torch_unet(nn)
    model = _torch_resnet8(nn)
    if case.norm == "group":
        _with_group_norm(model)
    return model


def _with_group_norm(module: Any) -> None:
    import math

    from torch import nn

    for name, child in module.named_children():
        if isinstance(child, nn.BatchNorm2d):
            norm = nn.GroupNorm(math.gcd(32, child.num_features), child.num_features)
            # timm's norms include their activation.
            activation = getattr(child, "act", None)
            setattr(module, name, nn.Sequential(norm, activation) if activation is not None else norm)
        else:
            _with_group_norm(child)


def _torch_resnet8(nn: Any) -> Any:
    """Builds He et al. 2016's network for CIFAR, one block a stage, shortcuts without weights, as ``cifar_resnet8``."""

    class Block(nn.Module):
        def __init__(self, channels: int, filters: int, stride: int) -> None:
            super().__init__()
            self.body = nn.Sequential(
                nn.Conv2d(channels, filters, 3, stride, 1, bias=False),
                nn.BatchNorm2d(filters),
                nn.ReLU(),
                nn.Conv2d(filters, filters, 3, 1, 1, bias=False),
                nn.BatchNorm2d(filters),
            )
            self.more, self.stride = filters - channels, stride

        def forward(self, x: Any) -> Any:
            shortcut = x[:, :, :: self.stride, :: self.stride]
            shortcut = nn.functional.pad(shortcut, (0, 0, 0, 0, 0, self.more))
            return nn.functional.relu(self.body(x) + shortcut)

    return nn.Sequential(
        nn.Conv2d(3, 16, 3, 1, 1, bias=False),
        nn.BatchNorm2d(16),
        nn.ReLU(),
        Block(16, 16, 1),
        Block(16, 32, 2),
        Block(32, 64, 2),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(64, CLASSES),
    )


def _torch_unet(nn: Any) -> Any:
    """Builds the network of Ronneberger et al. 2015 with unpadded convolutions, as ``unet``."""
    import torch

    def double(channels: int, filters: int) -> Any:
        return nn.Sequential(
            nn.Conv2d(channels, filters, 3), nn.ReLU(), nn.Conv2d(filters, filters, 3), nn.ReLU()
        )

    class UNet(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            sizes = [UNET_FILTERS * 2**i for i in range(5)]
            self.down = nn.ModuleList(double(a, b) for a, b in zip([1, *sizes], sizes))
            self.up = nn.ModuleList(
                nn.ConvTranspose2d(b, a, 2, 2) for a, b in zip(sizes[-2::-1], sizes[:0:-1])
            )
            self.decoders = nn.ModuleList(double(2 * a, a) for a in sizes[-2::-1])
            self.dropout, self.head = nn.Dropout(0.5), nn.Conv2d(sizes[0], CLASSES, 1)

        def forward(self, x: Any) -> Any:
            skips = []
            for encoder in self.down:
                x = encoder(x)
                skips.append(x)
                if len(skips) < len(self.down):
                    x = nn.functional.max_pool2d(x, 2)
            x = self.dropout(skips.pop())
            for enlarge, decoder in zip(self.up, self.decoders):
                x, skip = enlarge(x), skips.pop()
                border = (skip.shape[-1] - x.shape[-1]) // 2
                skip = skip[..., border : border + x.shape[-2], border : border + x.shape[-1]]
                x = decoder(torch.cat([x, skip], 1))
            return self.head(x)

    return UNet()


def serve(side: str, case: Case, fused: int) -> None:
    """Serves one side: reads numbers of weight updates (0 ends, -1 prints facts), and prints their seconds."""
    runner: Any
    if side == "session":
        runner = SessionSide(case)
        fused, groups = runner.fused, runner.side_by_side
    else:
        runner = (
            KerasSide(case, fused) if side.startswith("keras") else TorchSide(case, side == "torch compiled")
        )
        groups = 1
    runner.run(1)
    print(f"ready {groups} {fused}", flush=True)
    for line in sys.stdin:
        updates = int(line)
        if updates == 0:
            return
        if updates < 0:
            print(*runner.facts(), flush=True)
            continue
        started, processor = time.perf_counter(), time.process_time()
        runner.run(updates)
        print(time.perf_counter() - started, time.process_time() - processor, flush=True)


class Side:
    """A side in a process of its own.

    Args:
        name: what computes.
        case: the network and its batches.
        fused: the micro-batches in a batch of Keras.
        root: the checkout of the session.
    """

    def __init__(self, name: str, case: Case, fused: int = 1, root: Path = ROOT) -> None:
        self.messages = tempfile.TemporaryFile("w+", encoding="utf-8")  # noqa: SIM115
        script = root / "benchmarks" / "host_session.py"
        served = "session" if root != ROOT else name
        command = [sys.executable, str(script), "--serve", served, *map(str, case), str(fused)]
        self.name, self.samples = name, case.global_batch
        self.rates: List[Tuple[float, float]] = []
        self.process = start(
            command,
            root,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.messages,
            text=True,
            variables={"TF_ENABLE_ONEDNN_OPTS": "1"},
        )
        self.num_parallel, self.fused = map(int, self._line().split()[1:])
        self.updates = 1
        self.updates = max(1, round(ROUND_S / self.ask(1)[0]))

    def _line(self) -> str:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            self.messages.seek(0)
            raise SystemExit(
                f"{self.messages.read()[-3000:]}\nthe process of {self.name} died: its last words are above"
            )
        return line

    def ask(self, number: int) -> Tuple[float, ...]:
        assert self.process.stdin is not None
        self.process.stdin.write(f"{number}\n")
        self.process.stdin.flush()
        return tuple(float(part) for part in self._line().split())

    def measure(self) -> None:
        """Measures one round: images per second of wall time, and of processor time."""
        seconds, processor = self.ask(self.updates)
        images = self.updates * self.samples
        self.rates.append((images / seconds, images / processor))

    def median(self) -> float:
        return statistics.median(wall for wall, _ in self.rates)

    def close(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write("0\n")
        self.process.stdin.close()
        self.process.wait()


def checkout(revision: str) -> Path:
    """Returns a folder with the files of a revision."""
    folder = KEPT / f"revision-{git('rev-parse', '--verify', f'{revision}^{{commit}}')}"
    if not folder.exists():
        files = subprocess.run(["git", "archive", revision], cwd=ROOT, check=True, stdout=subprocess.PIPE)
        with tarfile.open(fileobj=io.BytesIO(files.stdout)) as archive:
            archive.extractall(folder)
    return folder


def sides_of(case: Case, against: List[str], fused: int) -> List[Side]:
    sides = []
    for other in against:
        if other == "keras":
            sides.append(Side("keras", case))
            if fused > 1:
                sides.append(Side("keras, fused", case, fused))
        elif other == "torch":
            sides += [Side("torch", case), Side("torch compiled", case)]
        else:
            sides.append(Side(f"session of {other}", case, root=checkout(other)))
    return sides


def measure(case: Case, against: List[str], rounds: int) -> List[Dict[str, Any]]:
    """Measures the rows of the table: the session, then each other side."""
    session = Side("session", case)
    at_a_time = min(session.num_parallel * session.fused, case.global_batch // case.micro_batch)
    others = sides_of(case, against, at_a_time)
    sides = [session, *others]
    for number in range(rounds):
        for side in sides if number % 2 == 0 else sides[::-1]:
            side.measure()
    share, memory = session.ask(-1)
    for side in sides:
        side.close()
    row = {**case._asdict(), "norm": case.norm}
    fused = f"{session.num_parallel}x{session.fused}" if session.num_parallel > 1 else str(session.fused)
    rows = [
        {
            **row,
            "side": "session",
            "images_per_s": round(session.median(), 1),
            "fused": fused,
            "share_of_peak": round(session.median() * share, 3),
            "memory_mib": round(memory),
        }
    ]
    for side in others:
        rows.append({**row, "side": side.name, "images_per_s": round(side.median(), 1)})
        for name, ratio in zip(("ratio", "ratio_of_processor_time"), ratios(session.rates, side.rates)):
            bounds = {"": ratio.value, "_lower": ratio.lower, "_upper": ratio.upper}
            rows[-1].update(
                (name + end, round(value, 3)) for end, value in bounds.items() if value is not None
            )
    return rows


def ratios(rates: List[Tuple[float, float]], others: List[Tuple[float, float]]) -> List[Median]:
    """Returns the median ratio within a round by the clock, and by processor time."""
    return [median([a[clock] / b[clock] for a, b in zip(rates, others)]) for clock in (0, 1)]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--against", nargs="+", default=["keras"], help="keras, torch, or a revision of this repository"
    )
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--only", help="a network")
    parser.add_argument("--micro-batch", type=int)
    parser.add_argument("--csv", type=Path, help="also write the rows there; its rows of other cases stay")
    add_again(parser)
    parser.add_argument("--serve", nargs=6, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.serve:
        side, network, *numbers = arguments.serve
        size, micro_batch, global_batch, fused = map(int, numbers)
        serve(side, Case(network, size, micro_batch, global_batch), fused)
        return
    against = list(arguments.against)
    if "torch" in against and not all(map(importlib.util.find_spec, ("torch", "timm"))):
        against.remove("torch")
        print("PyTorch or timm is not installed: left out")
    for revision in set(against) - {"keras", "torch"}:
        if not git("rev-parse", "--verify", "--quiet", f"{revision}^{{commit}}"):
            parser.error(f"--against {revision}: neither keras nor torch, nor a revision of this repository")
    packages = ["tensorflow", "keras", *(("torch", "timm") if "torch" in against else ())]
    command = f"python benchmarks/host_session.py --against {' '.join(against)} --rounds {arguments.rounds}"
    notes = Provenance(command, packages).columns()
    print(f"{notes['conditions']}; revision {notes['revision']}")
    print(f"training, {arguments.rounds} rounds, images/s; ratios by the clock, and by processor time")
    print(f"{'network':16} {'size':>4} {'batch':>5} {'of':>5} {'side':15} {'images/s':>8} {'ratio':>12} "
          f"{'fused':>5} {'of peak':>7} {'MiB':>6}")  # fmt: skip
    journal = Journal("host_session", arguments.again)
    cases = [
        case
        for case in CASES
        if arguments.only in (None, case.network) and arguments.micro_batch in (None, case.micro_batch)
    ]
    if not cases:
        raise SystemExit(
            f"no row of that network and micro-batch; there are {', '.join(c.network for c in CASES)}"
        )
    for case in cases:
        how = Provenance(command, packages)
        rows = journal.take(
            (*case, *against, arguments.rounds),
            lambda: [{**row, **how.columns()} for row in measure(case, against, arguments.rounds)],
        )
        for row in rows:
            ratio = f"{row['ratio']:.2f}, {row['ratio_of_processor_time']:.2f}" if "ratio" in row else ""
            peak = f"{row['share_of_peak']:.0%}" if "share_of_peak" in row else ""
            print(f"{row['network']:16} {row['size']:4} {row['micro_batch']:5} {row['global_batch']:5} "
                  f"{row['side']:15} {row['images_per_s']:8.1f} {ratio:>12} {row.get('fused', ''):>5} {peak:>7} "
                  f"{row.get('memory_mib', ''):>6}", flush=True)  # fmt: skip
            if "ratio_lower" in row:
                print(f"{'':48}95 %: {row['ratio_lower']:.3f} to {row['ratio_upper']:.3f}, by processor time "
                      f"{row['ratio_of_processor_time_lower']:.3f} to {row['ratio_of_processor_time_upper']:.3f}",
                      flush=True)  # fmt: skip
        if arguments.csv:
            write_rows(arguments.csv, rows, (*Case._fields, "side"))


if __name__ == "__main__":
    main()
