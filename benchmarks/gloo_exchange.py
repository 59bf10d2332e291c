"""How gloo uses a slow link: its own all-to-all and all-gather beside messages in pairs.

    PYTHONPATH=src python benchmarks/gloo_exchange.py          (root and iproute2: network namespaces)

Hosts with limited links (scripts/network_lab.py), one rank on each; every rank has `--mebibytes` for every other. The
ways take turns; a time is that of the slowest rank. `receive first` posts all receives before all sends, as frameworm's
compression hooks do on gloo; `send first` the other way round. `ideal` is the payload at the link's rate.
"""

from __future__ import annotations

import argparse
import json
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
import torch.distributed as dist
from harness import RESULTS, as_data, bootstrap_median, table, tell_progress, write_results
from lab import load_lab

MEBIBYTE = 2**20
TCP_SHARE = 0.955  # of a link's rate is payload


def work(options: argparse.Namespace) -> None:
    """One rank; the first prints the times of each way as JSON."""
    from frameworm.launch.process_group import cleanup, setup_ddp

    torch.set_num_threads(1)
    warnings.simplefilter("ignore")  # torch 2.13 has a new name for one of them
    info = setup_ddp(backend="gloo")
    rank, world_size = info.rank, info.world_size
    part = options.mebibytes * MEBIBYTE
    sent = torch.zeros(part * world_size, dtype=torch.uint8)
    received = torch.zeros_like(sent)
    others = [(rank + step) % world_size for step in range(1, world_size)]

    def pairs(receive_first: bool) -> None:
        receives = [(dist.irecv, received[other * part : (other + 1) * part], other) for other in others]
        sends = [(dist.isend, sent[other * part : (other + 1) * part], other) for other in others]
        ordered = [*receives, *sends] if receive_first else [*sends, *receives]
        for message in [call(tensor, other) for call, tensor, other in ordered]:
            assert message is not None
            message.wait()

    ways: dict[str, Callable[[], Any]] = {
        "all_to_all": lambda: dist.all_to_all_single(received, sent),
        "all_gather": lambda: dist.all_gather_into_tensor(received, sent[:part]),
        "receive first": lambda: pairs(True),
        "send first": lambda: pairs(False),
    }
    times: dict[str, list[float]] = {name: [] for name in ways}
    for number in range(options.rounds + 1):
        for name, way in ways.items():
            dist.barrier()
            begin = perf_counter()
            way()
            took = torch.tensor([perf_counter() - begin], dtype=torch.float64)
            dist.all_reduce(took, op=dist.ReduceOp.MAX)
            if number:  # the first makes connections
                times[name].append(float(took))
    if rank == 0:
        print(json.dumps(times), flush=True)
    cleanup()


def main() -> int:
    """Build the labs and run all ways in each."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    add = parser.add_argument
    add("--hosts", type=lambda text: [int(part) for part in text.split(",")], default=[2, 4], help="numbers of hosts")
    add("--mbit", type=int, default=100, help="rate of each link, Mbit/s")
    add("--mebibytes", type=int, default=2, help="from each rank to each other")
    add("--rounds", type=int, default=15)
    add("--out", type=Path, default=RESULTS, help="folder for the results")
    add("--worker", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        work(options)
        return 0
    command = [sys.executable, __file__, "--worker", "--rounds", str(options.rounds)]
    command += ["--mebibytes", str(options.mebibytes)]
    results: dict[str, Any] = {}
    for hosts in options.hosts:
        tell_progress(f"{hosts} hosts")
        with load_lab().NetworkLab(hosts=hosts, rate=f"{options.mbit}mbit") as lab:
            first, *others = lab.run(command, timeout_s=600)
        for item in (first, *others):
            if item.returncode != 0:
                raise SystemExit(f"host {item.host} failed:\n{item.stderr[-2000:]}")
        times = json.loads(first.stdout.strip().splitlines()[-1])
        ideal_s = options.mebibytes * MEBIBYTE * (hosts - 1) * 8 / (options.mbit * 1e6 * TCP_SHARE)
        results[str(hosts)] = {
            "ideal_s": ideal_s,
            "ways": {
                name: {"seconds": as_data(bootstrap_median(taken)), "rounds": taken} for name, taken in times.items()
            },
        }
    names = list(next(iter(results.values()))["ways"])
    rows = [("ideal", *(f"{found['ideal_s'] * 1e3:.0f}" for found in results.values()))]
    for name in names:
        cells = [found["ways"][name]["seconds"] for found in results.values()]
        rows.append((name, *(f"{c['value'] * 1e3:.0f} ({c['low'] * 1e3:.0f}..{c['high'] * 1e3:.0f})" for c in cells)))
    print(table(("ms", *(f"{hosts} hosts" for hosts in results)), rows))
    settings = {"mbit": options.mbit, "mebibytes": options.mebibytes, "rounds": options.rounds}
    print(f"written to {write_results('gloo_exchange', torch.device('cpu'), settings, results, options.out)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
