#!/bin/sh
# SuperLink, behind nginx. Stop it with Ctrl-C.
cd "$(dirname "$0")" && umask 077 || exit 1
export FLWR_HOME="$PWD/flower" FLWR_TELEMETRY_ENABLED=0 FLWR_DISABLE_UPDATE_CHECK=1
trap 'kill $proxy $node 2>/dev/null; wait' EXIT
trap exit INT TERM
nginx -p "$PWD" -e stderr -c nginx.conf & proxy=$!
while kill -0 $proxy 2>/dev/null; do  # nginx has said why if it stops
    flower-superlink --insecure --host 127.0.0.1 --port @link --disable-runtime-dependency-installation & node=$!
    wait $node
    sleep 5
done
