#!/bin/sh
# Starts the server in the background. FLARE reads its policy and server.toml from the kit's local folder.
set -eu
umask 077
cd "$(dirname "$0")"
kit=$(echo "$PWD"/kit/fedxl/prod_00/*)
cp local/*.json "$kit/local/"
ln -sf "$PWD/server.toml" "$kit/local/server.toml"
mkdir -p jobs
export NVFL_JOB_STORE_ROOT="$PWD/jobs"
"$kit/startup/start.sh"
