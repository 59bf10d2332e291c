"""What the server imports last: the libraries that the workload of its trials is known to import."""

from __future__ import annotations

from frameworm.tune.processes.forkserver import import_libraries

import_libraries()
