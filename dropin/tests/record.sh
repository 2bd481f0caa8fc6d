#!/usr/bin/env bash
# Record what scripts give under the package installed beside PYTHON: record.sh PYTHON FOLDER
set -eu
python=$1; out=$2; here=$(cd "$(dirname "$0")" && pwd); work=$(mktemp -d)
export OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 ACCELERATE_USE_CPU=1
two="$python -m torch.distributed.run --nproc-per-node 2 --master-port ${PORT:-29641}"
mkdir -p "$out"
cd "$work"
$python "$here/run_parity.py" run "$out/parity_1.json"
$two "$here/run_parity.py" run "$out/parity_2.json"
for client in trainer lora sft; do
    $python "$here/clients/$client.py" "$work/$client-1" "$out/${client}_1.json"
    $two "$here/clients/$client.py" "$work/$client-2" "$out/${client}_2.json"
done
$python -c "
import importlib.metadata as m, json
names = ['torch', 'transformers', 'peft', 'trl', 'datasets', 'accelerate']
print(json.dumps({name: m.version(name) for name in names}))" > "$out/versions.json"
