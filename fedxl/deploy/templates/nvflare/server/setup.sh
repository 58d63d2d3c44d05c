#!/bin/sh
# Creates the authority of this federation, and the keys and startup kits of its server and its admin. Run it once.
set -eu
umask 077
cd "$(dirname "$0")"
nvflare cert init --profile project.yml -o ../authority
for who in server admin; do
    nvflare cert request -p $who.yml --out requests/$who
    signed=requests/$who.signed.zip
    nvflare cert approve requests/$who/*.request.zip -c ../authority --profile project.yml --out $signed
    nvflare package $signed --request-dir requests/$who -w kit
done
mv kit/fedxl/prod_00/@admin ../admin
