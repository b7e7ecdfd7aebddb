"""The vLLM environments of the interop tests, which live in the user's cache and are made there if missing."""

from __future__ import annotations

import os
import subprocess
from dataclasses import dataclass
from pathlib import Path

from enginewire.models import cache_dir

HERE = Path(__file__).parent
VERSIONS = ("0.25.1", "0.32.0")


@dataclass(frozen=True)
class Environment:
    """A vLLM to test against.

    Attributes:
        version: of vLLM.
        python: the interpreter of its virtual environment.
        model: SmolLM2 as a Hugging Face folder, bfloat16.
    """

    version: str
    python: Path
    model: Path

    @property
    def cli(self) -> Path:
        """What ``python`` runs as the command ``vllm``."""
        return HERE / "vllm_cli.py"


def interop_folder() -> Path:
    """Return where the environments are."""
    return Path(os.environ.get("ENGINEWIRE_INTEROP_DIR") or cache_dir() / "interop")


def ensure(version: str) -> Environment:
    """Return a version's environment, after making it if it is missing. Fails, and never skips, if that fails."""
    folder = interop_folder() / f"vllm-{version}"
    model = interop_folder() / "hf"
    if not ((folder / f".ready-{version}").exists() and (model / "config.json").exists()):
        subprocess.run([HERE / "setup_vllm.sh", version], check=True, stdin=subprocess.DEVNULL)
    return Environment(version, folder / "bin" / "python", model)
