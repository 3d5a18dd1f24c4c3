"""Op families. Importing the package registers every op of every file in it and in its rooms (vkback.ops.op.OPS)."""

import importlib
import pkgutil

for _module in pkgutil.walk_packages(__path__, f"{__name__}."):
    importlib.import_module(_module.name)
