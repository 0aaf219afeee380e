"""Makes transformers' Auto classes know LLaDA without importing transformers.

``import bwsft`` must register the model, and must stay cheap: transformers' modeling code takes
3 s to import, and ``bwsft --help`` has to answer within 1 s. So the registering module is imported
right after the Auto module that it registers with, whenever that happens; where the Auto module is
there already, at once. The two stages differ because transformers itself imports
``configuration_auto`` half-way through ``modeling_utils``, when no model class can be defined.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType

_REGISTERED_BY = {
    "transformers.models.auto.configuration_auto": "bwsft.models.llada_config",
    "transformers.models.auto.modeling_auto": "bwsft.models.llada",
}


class _RegisterAfterImport(MetaPathFinder):
    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name not in _REGISTERED_BY:
            return None
        spec = PathFinder.find_spec(name, path, target)
        if spec is not None and spec.loader is not None:
            load = spec.loader.exec_module

            def load_and_register(module: ModuleType) -> None:
                load(module)
                importlib.import_module(_REGISTERED_BY[name])

            spec.loader.exec_module = load_and_register
        return spec


def register_with_transformers() -> None:
    """Register LLaDA with the Auto classes, now or as soon as transformers loads them."""
    sys.meta_path.insert(0, _RegisterAfterImport())
    for watched, registrar in _REGISTERED_BY.items():
        if watched in sys.modules:
            importlib.import_module(registrar)
