"""Imported last by the server: imports the libraries that the workload of its trials uses."""

from __future__ import annotations

from frameworm.tune.processes.forkserver import import_libraries

import_libraries()
