"""Executors: what runs the model. ``EchoExecutor`` needs none; ``OpenVINOExecutor`` runs GGUF files on the CPU.

``OpenVINOExecutor`` is loaded when it is asked for, so that using the other needs no model library.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from enginewire.executors.echo import EchoExecutor

if TYPE_CHECKING:
    from enginewire.executors.openvino import OpenVINOExecutor

__all__ = ["EchoExecutor", "OpenVINOExecutor"]


def __getattr__(name: str) -> object:
    if name == "OpenVINOExecutor":
        from enginewire.executors.openvino import OpenVINOExecutor

        return OpenVINOExecutor
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
