"""Experiments: one module a method, run with ``python -m experiments``.

The package path is extended, so that an ``experiments/`` folder of your own on ``PYTHONPATH`` (or in the working
directory) adds its modules to the list.
"""

import pkgutil

__path__ = pkgutil.extend_path(__path__, __name__)
