"""Checkpointing inside training frameworks. `accelerate`, `lightning` and `transformers` import their
framework; import the one that you use.

Raises NotInstalled where torch or the framework is missing.
"""

from ..extras import needed

with needed("torch", "lastgood.integrations"):
    import torch  # noqa: F401 - imported here only so that a missing torch is reported by name
