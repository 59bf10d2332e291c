"""`frameworm train` for those who start a script; under torchrun or srun it joins the other processes by itself.

python src/train.py --config configs/quickstart.yaml
torchrun --nproc-per-node 4 src/train.py --config configs/ag_news_ddp_4gpu_20ep.yaml
"""

from __future__ import annotations

import sys

from frameworm.cli.main import main
from frameworm.errors import FramewormError
from frameworm.launch.environment import detect


def _one_of_several() -> bool:
    try:
        return detect().world_size > 1
    except FramewormError:
        return True  # `train --distributed` says what is wrong


if __name__ == "__main__":
    if "--distributed" not in sys.argv and _one_of_several():
        sys.argv.append("--distributed")
    sys.argv[1:1] = ["train"]
    main()
