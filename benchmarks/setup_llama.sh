#!/usr/bin/env bash
# Makes the environment of bench_llm.py's llama.cpp column in the user's cache, if it is missing, and prints its Python.
# Needs 130 MB of disk. PYTHON=python3.12 names another interpreter.
set -euo pipefail
folder=${ENGINEWIRE_CACHE:-${XDG_CACHE_HOME:-$HOME/.cache}/enginewire}/bench/llama
version=2026.10.11549
if [[ ! -e $folder/.ready-$version ]]; then
  echo "making $folder: xllamacpp $version (once) …" >&2
  rm -rf "$folder" # an interrupted one
  "${PYTHON:-python3}" -m venv "$folder"
  "$folder/bin/python" -m pip --quiet --disable-pip-version-check --no-input install "xllamacpp==$version"
  touch "$folder/.ready-$version"
fi
echo "$folder/bin/python"
