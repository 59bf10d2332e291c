"""Tables, figures and a page about how the runs in a folder scale: the same as `frameworm report`.

python scripts/plot_comprehensive_analysis.py --root experiments --out plots --warmup 1 --datasets IMDB AGNews
"""

from __future__ import annotations

import sys

from frameworm.cli.main import main

if __name__ == "__main__":
    sys.argv[1:1] = ["report"]
    main()
