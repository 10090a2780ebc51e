"""Draws the learning curves of a run folder.  Usage: python benchmarks/plot_run.py RUN OUTPUT.png"""

import json
import sys
from pathlib import Path


def main() -> None:
    run, output = Path(sys.argv[1]), sys.argv[2]
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    report = json.loads((run / "report.json").read_text(encoding="utf-8"))
    per_epoch = report["program"]["weight_updates_per_epoch"]
    figure, axes = plt.subplots(1, 2, figsize=(9, 3.2), constrained_layout=True)
    for event, label in (("execution", "training"), ("validation", "held out")):
        picked = [row for row in rows if row["event"] == event]
        epochs = [row["weight_updates"] / per_epoch for row in picked]
        axes[0].plot(epochs, [row["loss"] for row in picked], label=label)
        axes[1].plot(epochs, [100 * row["accuracy"] for row in picked], label=label)
    axes[0].set(xlabel="epoch", ylabel="loss", yscale="log")
    axes[1].set(xlabel="epoch", ylabel="accuracy in %", ylim=(0, 101))
    axes[1].legend(loc="lower right")
    for axis in axes:
        axis.grid(alpha=0.3)
    program = report["program"]
    figure.suptitle(
        f"{report['model']} on {report['dataset']['name']}, {program['num_replicas']} replica(s) x "
        f"{program['gradient_accumulation_count']} x micro-batch {program['micro_batch_size']}, "
        f"{report['measured']['images_per_s']:.0f} images/s on {report['compilation']['device']['kind'].upper()}",
        fontsize=10,
    )
    figure.savefig(output, dpi=120)


if __name__ == "__main__":
    main()
