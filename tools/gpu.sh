#!/bin/sh
# A day on a lent GPU in five commands; docs/gpu.md says what each takes and what comes back.
#
#   tools/gpu.sh pack STAGE [--have=FILE] [--python=3.12]   with a network: lay packages into gpu-pack/STAGE/1, 2, ...
#   sh gpu.sh take FOLDER                                   on the bare machine, for each package; the last one unpacks
#   tools/gpu.sh STAGE [--minutes=8] [OPTION=VALUE ...]     probe, bench7b, model, train or memory; files in $OUT
#   tools/gpu.sh STAGE --dry                                the same steps at toy size, on a CPU
#
# GPU_HOME: where packages are unpacked (~/gpu-day). OUT: where results go (gpu-out). PYTHON: the interpreter.
set -eu
usage() { sed -n '4,9s/^# *//p' "$0" >&2; exit 2; }

take() { # keep a package's piece; once all pieces are here, unpack them, and what they install
    home=${GPU_HOME:-$HOME/gpu-day}
    mkdir -p "$home/pieces"
    cmp -s "$1/SHA256SUMS" "$home/pieces/SHA256SUMS" || rm -f "$home/pieces"/* # of the stage before
    cp "$1"/piece.* "$1/SHA256SUMS" "$home/pieces"
    cd "$home/pieces"
    sha256sum --quiet --ignore-missing -c SHA256SUMS
    for piece in $(cut -d' ' -f3 SHA256SUMS); do
        [ -f "$piece" ] || { echo "$piece is still missing"; exit 0; }
    done
    cat $(cut -d' ' -f3 SHA256SUMS) | tar -xz -C "$home"
    cd "$home"
    "$python" -m pip install --quiet --no-index --no-deps --no-compile --upgrade --target gpu-site gpu-wheels/*.whl
    echo "unpacked: cd $home && tools/gpu.sh STAGE"
}

[ $# -gt 0 ] || usage
if [ "$1" = take ]; then
    [ $# -eq 2 ] || usage
    python=${PYTHON:-python3}
    take "$2"
    exit
fi
cd "$(dirname "$0")/.."
python=${PYTHON:-python3}
[ -n "${PYTHON:-}" ] || [ ! -x .venv/bin/python ] || python=.venv/bin/python
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}"
[ ! -d gpu-site ] || export PYTHONPATH="$PYTHONPATH:$PWD/gpu-site"
[ ! -d gpu-cache ] || export SPECBENCH_CACHE="${SPECBENCH_CACHE:-$PWD/gpu-cache}"
exec "$python" -m specbench.gpu_day "$@"
