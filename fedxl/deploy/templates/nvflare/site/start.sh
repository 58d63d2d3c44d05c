#!/bin/sh
# Starts site @name in the background. FLARE reads its policy and site.toml from the kit's local folder.
set -eu
umask 077
cd "$(dirname "$0")"
kit=$(echo "$PWD"/kit/fedxl/prod_00/*)
cp local/*.json "$kit/local/"
ln -sf "$PWD/site.toml" "$kit/local/site.toml"
fedxl site prepare . --if-needed
"$kit/startup/start.sh"
