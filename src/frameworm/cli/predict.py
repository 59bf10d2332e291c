"""`predict`."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Optional

import typer

from frameworm import compat
from frameworm.cli.output import run_folder, say
from frameworm.errors import ConfigError, EnvironmentSetupError

if TYPE_CHECKING:
    from frameworm.scaling.profile import Source


def register(app: typer.Typer) -> None:
    """Add the verb."""
    app.command()(predict)


def predict(
    run: Optional[Path] = typer.Argument(  # noqa: UP045
        None,
        parser=run_folder,
        metavar="[RUN]",
        help="Folder or URL of a run on one device; or give --case, or --compute-ms and --gradient-mb.",
    ),
    world_sizes: str = typer.Option("1,2,4,8", help="Numbers of ranks to predict, such as 1,2,4,8,64."),
    network: Optional[Path] = typer.Option(None, help="A network.json written by `frameworm network`."),  # noqa: UP045
    bandwidth_gbps: Optional[float] = typer.Option(  # noqa: UP045
        None, help="Bandwidth of one link in one direction, in Gbit/s (per node with --gpus-per-node)."
    ),
    latency_us: Optional[float] = typer.Option(None, help="Latency of one message between neighbours."),  # noqa: UP045
    fabric: Optional[str] = typer.Option(  # noqa: UP045
        None, help="A preset: nvlink4, infiniband-ndr, infiniband-hdr, 100gbe, 25gbe, 10gbe, 1gbe, ..."
    ),
    gpus_per_node: int = typer.Option(1, min=1, help="Ranks per node; they reduce over --inside first."),
    inside: str = typer.Option("nvlink4", help="The preset between the GPUs of one node."),
    links_per_node: int = typer.Option(1, min=1, help="Links of the fabric per node."),
    weak: bool = typer.Option(
        False,
        "--weak/--strong",
        help="Strong: the ranks divide a fixed global batch. Weak: the batch per device stays.",
    ),
    scaling: Optional[str] = typer.Option(None, hidden=True),  # noqa: UP045
    strategy: str = typer.Option("ddp", help="ddp, zero1, zero2 or zero3."),
    compression: str = typer.Option("off", help="off, fp16, bf16, int8, int4, topk or powersgd."),
    price_per_gpu_hour: Optional[float] = typer.Option(None, min=0.0, help="Price for the cost column."),  # noqa: UP045
    settings: list[str] = typer.Option(
        [], "--set", metavar="KEY=VALUE", help="Change a setting: --set parallel.bucket_cap_mb=5"
    ),
    case: Optional[Path] = typer.Option(None, help="JSON file with the times of a step, instead of a run."),  # noqa: UP045
    compute_ms: Optional[float] = typer.Option(None, help="Step time of one device, instead of a run."),  # noqa: UP045
    gradient_mb: Optional[float] = typer.Option(None, help="Size of the gradients, with --compute-ms."),  # noqa: UP045
    measure_codecs: bool = typer.Option(True, help="Time the codecs here if this machine is like the run's."),
    out: Optional[Path] = typer.Option(  # noqa: UP045
        None, help="Folder for prediction.json, prediction.txt and prediction.svg."
    ),
    as_json: bool = typer.Option(False, "--json", help="Print everything as JSON."),
) -> None:
    """Predict step time, speedup, efficiency and cost on more devices, from a run on one device and a network.

    Example: frameworm predict RUN --world-sizes 1,2,4,8,64 --bandwidth-gbps 10 --latency-us 50

    By hand: frameworm predict --compute-ms 135 --gradient-mb 28 --fabric 10gbe --world-sizes 1,4
    """
    from frameworm.scaling.options import make_prediction

    if scaling is not None:
        say(f"frameworm: {compat.PREDICT_SCALING}", file=sys.stderr)
    scaling = scaling or ("weak" if weak else "strong")
    prediction = make_prediction(
        _sizes(world_sizes),
        run,
        network=network,
        bandwidth_gbps=bandwidth_gbps,
        latency_us=latency_us,
        fabric=fabric,
        gpus_per_node=gpus_per_node,
        inside=inside,
        links_per_node=links_per_node,
        scaling=scaling,
        strategy=strategy,
        compression=compression,
        price_per_gpu_hour=price_per_gpu_hour,
        settings=settings,
        case=case,
        compute_ms=compute_ms,
        gradient_mb=gradient_mb,
        codec_costs=_codec_costs if measure_codecs else None,
    )
    from frameworm.report.scaling.prediction_text import render_prediction

    text = render_prediction(prediction)
    if out is not None:
        from frameworm.records.atomic import write_atomic
        from frameworm.records.printable import printable
        from frameworm.report.scaling.prediction_chart import render_prediction_svg

        try:
            out.mkdir(parents=True, exist_ok=True)
            write_atomic(out / "prediction.json", json.dumps(prediction.to_dict(), indent=2) + "\n")
            write_atomic(out / "prediction.txt", printable(text))
            write_atomic(out / "prediction.svg", render_prediction_svg(prediction))
        except OSError as error:
            raise EnvironmentSetupError(f"cannot write to {out}: {error.strerror or error}; change --out") from error
        text += f"written to {out}\n"
    say(json.dumps(prediction.to_dict()) if as_json else text, end="\n" if as_json else "")


def _sizes(text: str) -> list[int]:
    try:
        return [int(part) for part in text.replace(" ", "").split(",") if part]
    except ValueError:
        raise ConfigError(f"--world-sizes {text} is not a list of numbers such as 1,2,4,8") from None


def _codec_costs(source: Source, ratio: float, powersgd_rank: int) -> dict[str, float]:
    """Time the codecs; torch is imported only where that is asked for."""
    if source.device is None:
        return {}
    from frameworm.parallel.compression.codec_cost import costs_here

    return costs_here(source, ratio, powersgd_rank)
