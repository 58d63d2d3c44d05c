#!/bin/sh
# Makes a trial: the data of three hospitals, and a folder with settings and keys for the server and each site.
# Usage: trial.sh FOLDER HOST [more options of fedxl deploy init]. HOST is the server's name, as sites reach it.
set -eu
examples=$(cd "$(dirname "$0")/../examples" && pwd)
folder=$1 host=$2
shift 2
cd "$folder"
if [ -d trial ]; then
    echo "$folder/trial is kept as it is"
    exit
fi
rm -rf new
python "$examples/make_hospitals.py"
fedxl deploy init new --sites east,north,south --host "$host" --config "$examples/table.toml" "$@"
# Each site trains on its own table, tests the model on it, and tells the metrics; the tables are small.
sed -i 's/^evaluate = "server"/evaluate = "sites"/' new/server/server.toml
for site in east north south; do
    sed -i -e "s|hospitals/\*|hospitals/$site|; s/^evaluate = \"none\"/evaluate = \"metrics\"/" \
        -e '/^evaluate = /i fewest = 5' "new/sites/$site/site.toml"
done
mv new trial
