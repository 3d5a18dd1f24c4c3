"""Op families. Importing the package registers every op of every file in it (vkback.ops.op.OPS)."""

import importlib
import pkgutil

for _module in pkgutil.iter_modules(__path__):
    importlib.import_module(f"{__name__}.{_module.name}")
