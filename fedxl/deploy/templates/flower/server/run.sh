#!/bin/sh
# Submits a run, which resumes from its last checkpoint if there is one, and shows its log.
cd "$(dirname "$0")" || exit 1
export FLWR_HOME="$PWD/flower" FLWR_TELEMETRY_ENABLED=0 FLWR_DISABLE_UPDATE_CHECK=1
exec flwr run ../app fedxl --stream
