"""Trains networks for a short time, exports each to every format, and prints how far files are from runs.

    python benchmarks/exports.py FOLDER [NETWORK...]

FOLDER is made, and holds the runs and the exports afterwards. A run that is there already is not trained again.
"""

import contextlib
import io
import json
import sys
from pathlib import Path

from ipucnn import cli

FORMATS = ("saved-model", "onnx", "tflite", "keras")
TRAINING = "--num-epochs 1 --limit-train 64 --seed 1 --micro-batch-size 4 --gradient-accumulation-count 4"
TRAINING += " --no-validation"
# Deep networks are trained for longer: after a few weight updates on micro-batches of 4 they multiply rounding so much
# that their own sums, in batches of 1 and of 8, differ by more than an export may.
LONGER = "--num-epochs 2 --seed 1 --micro-batch-size 16 --gradient-accumulation-count 1 --no-validation"
NETWORKS = {
    "cifar_resnet8": "--dataset digits --num-epochs 10 --seed 1",
    "efficientnet-b0": f"--dataset digits {LONGER} --image-size 32",
    "mobilenetv2": f"--dataset digits {TRAINING} --image-size 32",
    "unet": f"--dataset membranes {TRAINING} --image-size 188 --base-filters 16",
    "resnet50": f"--dataset digits {LONGER} --image-size 32",
}


def ipucnn(*words: str) -> str:
    """The output of a command, which must not fail; in this process, so that TensorFlow is imported once."""
    with contextlib.redirect_stdout(io.StringIO()) as output:
        code = cli.run(list(words))
    if code:
        raise SystemExit(f"ipucnn {' '.join(words)} ended with code {code}")
    return output.getvalue()


def main() -> None:
    folder = Path(sys.argv[1])
    print("| network | format | runtime | samples | difference of the deviation | same class |")
    print("| --- | --- | --- | --- | --- | --- |", flush=True)
    for name in sys.argv[2:] or NETWORKS:
        run = folder / name
        if not (run / "report.json").is_file():
            ipucnn("train", name, *NETWORKS[name].split(), "--run-dir", str(run), "--overwrite")
        for form in FORMATS:
            output = str(folder / f"{name}-{form}")
            record = json.loads(
                ipucnn("export", str(run), "--format", form, "--output", output, "--overwrite", "--json")
            )
            proof = record["proof"]
            print(
                f"| {name} | {form} | {proof['runtime']} | {proof['samples']} | {proof['relative']:.1e} | "
                f"{proof['agreement']:.2%} |",
                flush=True,
            )


if __name__ == "__main__":
    main()
