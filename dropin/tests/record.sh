#!/usr/bin/env bash
# Record what scripts give under the package installed beside PYTHON: record.sh PYTHON FOLDER
set -eu
python=$1; out=$2; here=$(cd "$(dirname "$0")" && pwd); work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
export OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 HF_EVALUATE_OFFLINE=1 ACCELERATE_USE_CPU=1 HF_HOME=$work/hub
two="$python -m torch.distributed.run --standalone --nproc-per-node 2"
mkdir -p "$out"
cd "$work"
try() { echo "recording ${*: -1}"; timeout 1200 "$@" >"$work/log" 2>&1 || { cat "$work/log"; exit 1; }; }

try $python "$here/run_parity.py" run "$out/parity_1.json"
try $two "$here/run_parity.py" run "$out/parity_2.json"
for client in ${CLIENTS:-trainer lora sft sentences scenarios preferences}; do
    try $python "$here/clients/$client.py" "$work/$client-1" "$out/${client}_1.json"
    try $two "$here/clients/$client.py" "$work/$client-2" "$out/${client}_2.json"
done
try $python "$here/record_tutorials.py" "$out/tutorials"
$python -c "
import importlib.metadata as m, json, platform
names = ['torch', 'transformers', 'peft', 'trl', 'datasets', 'evaluate', 'accelerate']
print(json.dumps({name: m.version(name) for name in names} | {'machine': platform.machine()}))" > "$out/versions.json"
