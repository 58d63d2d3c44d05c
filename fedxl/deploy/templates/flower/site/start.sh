#!/bin/sh
# A SuperNode, and nginx to connect it. Stop it with Ctrl-C.
cd "$(dirname "$0")" && umask 077 || exit 1
export FLWR_HOME="$PWD/flower" FLWR_TELEMETRY_ENABLED=0 FLWR_DISABLE_UPDATE_CHECK=1
trap 'kill $proxy $node 2>/dev/null; wait' EXIT
trap exit INT TERM
fedxl site prepare . --if-needed || exit 1
nginx -p "$PWD" -e stderr -c nginx.conf & proxy=$!
while kill -0 $proxy 2>/dev/null; do  # nginx has said why if it stops
    flower-supernode --insecure --superlink 127.0.0.1:@local --port @runtime \
        --node-config "site=\"$PWD/site.toml\"" & node=$!
    wait $node
    sleep 5
done
