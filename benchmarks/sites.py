"""Trains one adapter synchronously and by 2 and 4 sites, on as many tokens, and compares held-out losses and bytes.

    python benchmarks/sites.py --model MODEL --data train.jsonl --eval-data heldout.jsonl --to FOLDER [--sites 2 4]
        [OPTIONS OF TRAIN]

The sites are processes on this machine that share a folder; each trains on its share of the rows, and has so many fewer
rows in a step. Their bytes are those that they wrote to the folder and read from it, all files counted; the bytes of
synchronous training are those of float32 gradients in a ring, at every step. The first site alone evaluates.
"""

import argparse
import os
import subprocess
import sys
import time
from pathlib import Path

from sharding.compression import wire_bytes
from zagora_jax.checkpoints.safetensors_file import read_header
from zagora_jax.run_directory import RunDirectory, read_metrics


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--eval-data", type=Path, required=True)
    parser.add_argument("--to", type=Path, required=True)
    parser.add_argument("--sites", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--steps", type=int, default=128)
    parser.add_argument("--every", type=int, default=32)
    parser.add_argument("--rows", type=int, default=4, help="of a step, over all sites")
    parser.add_argument("--only-sites", action="store_true", help="take the synchronous run that is there")
    options, others = parser.parse_known_args()
    common = [f"--model={options.model}", f"--data={options.data}", f"--max-steps={options.steps}"]
    common += ["--gradient-accumulation-steps=1", "--packing=true", "--log-every=16", "--save-every=1000000", *others]
    evaluated = [f"--eval-data={options.eval_data}", f"--eval-every={options.every}"]
    synchronous = options.to / "synchronous"
    if not options.only_sites:
        run({synchronous: [*common, *evaluated, f"--micro-batch-size={options.rows}"]})
    parameters = sum(
        info.nbytes // 4 for info in read_header(synchronous / "adapter" / "adapter_model.safetensors").values()
    )
    print(f"{parameters:,} trained parameters")
    print("| sites | step: held-out loss | against synchronous | MB a site sends | receives | fewer bytes, all sites |")
    print("| --- | --- | --- | --- | --- | --- |")
    last = report(synchronous)["loss_after"]
    print(f"| synchronous | {curve(synchronous)} | | | | |")
    for sites in options.sites:
        folders = [options.to / f"{sites}-sites" / f"site{number}" for number in range(1, sites + 1)]
        run(
            {
                folder: [
                    *common,
                    *(evaluated if folder == folders[0] else []),
                    f"--micro-batch-size={options.rows // sites}",
                    f"--sites.folder={options.to / f'{sites}-sites' / 'shared'}",
                    f"--sites.name={folder.name}",
                    f"--sites.every={options.every}",
                    f"--sites.share={number}/{sites}",
                    "--sites.wait=3600",
                ]
                for number, folder in enumerate(folders, start=1)
            }
        )
        metrics = [read_metrics(folder / "metrics.jsonl") for folder in folders]
        exchanges = [[line["sites"] for line in lines if "sites" in line] for lines in metrics]
        for own in exchanges:
            assert all(len(one["counted"]) in (0, sites) for one in own), "a round was closed without some site"
        sent, received = ([own[-1][f"{what}_bytes"] for own in exchanges] for what in ("sent", "received"))
        ring = 2 * sites * options.steps * wire_bytes(parameters, sites, "none")  # sent and received
        loss = report(folders[0])["loss_after"]
        most = f"{max(sent) / 1e6:.2f} | {max(received) / 1e6:.2f}"
        fewer = f"{ring / (sum(sent) + sum(received)):.0f} x ({ring / 2e6 / sites:,.0f} MB sent by each)"
        print(f"| {sites} | {curve(folders[0])} | {loss / last - 1:+.2%} | {most} | {fewer} |")


def run(commands: dict[Path, list[str]]) -> None:
    """Train at the same time, and wait for all."""
    began, processes = time.monotonic(), {}
    for folder, arguments in commands.items():
        folder.parent.mkdir(parents=True, exist_ok=True)
        log = folder.with_suffix(".log").open("w")
        command = [sys.executable, "-m", "zagora_jax.train", *arguments, f"--output={folder}"]
        processes[folder] = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, env=os.environ)
    for folder, process in processes.items():
        if process.wait():
            sys.exit(f"{folder}: ended with {process.returncode}; see {folder.with_suffix('.log')}")
    print(f"{', '.join(folder.name for folder in commands)}: {time.monotonic() - began:.0f} s", file=sys.stderr)


def report(folder: Path) -> dict:
    return RunDirectory(folder).read_report()


def curve(folder: Path) -> str:
    lines = read_metrics(folder / "metrics.jsonl")
    points = {line["step"]: line["eval_loss"] for line in lines if "eval_loss" in line}
    points = {0: report(folder)["loss_before"], **points, lines[-1]["step"]: report(folder)["loss_after"]}
    return ", ".join(f"{step}: {loss:.4f}" for step, loss in points.items())


if __name__ == "__main__":
    main()
